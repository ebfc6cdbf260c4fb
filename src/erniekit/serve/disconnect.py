"""Work for a request that ends with its connection. Used by api.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from erniekit.serve.middleware import Receive


async def until_disconnect(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`, or None when the client left first; then the work is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
