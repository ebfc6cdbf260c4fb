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

    work_task, watch_task = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        for task in (work_task, watch_task):
            task.cancel()
        await asyncio.gather(work_task, watch_task, return_exceptions=True)
