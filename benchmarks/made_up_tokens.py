"""An engine without a model, for serve_speed.py: what HTTP alone sustains."""

from __future__ import annotations

import asyncio
from typing import Any

from erniekit.serve.engines.base import Done, Load, Token, TokenStream


class MadeUpTokens:
    """An engine that makes tokens up: each burst gives every stream some, as fast as the loop takes them."""

    def __init__(self, burst: int) -> None:
        self.burst, self.idle = burst, Load()
        self.going: dict[Any, int] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, *jobs: Any) -> Any:
        stream = TokenStream(jobs)
        self.going[stream] = jobs[0].sampling.max_tokens
        if len(self.going) == 1:
            asyncio.get_running_loop().call_soon(self._step)
        return stream

    def _step(self) -> None:
        for stream, left in list(self.going.items()):
            for k in range(min(self.burst, left)):
                stream.events.put_nowait((0, Token(200 + (left + k) % 900)))
            self.going[stream] = left - self.burst
            if left <= self.burst:
                stream.events.put_nowait((0, Done("length")))
                del self.going[stream]
        if self.going:
            asyncio.get_running_loop().call_later(0.0005, self._step)

    def cancel(self, stream: Any, number: int | None = None) -> None:
        self.going.pop(stream, None)

    def load(self) -> Any:
        return self.idle

    def stop(self, message: str) -> None: ...
