"""Whether a server can still answer: the engine's steps, the prompt work, the event loop itself. Used by api.py."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from erniekit.serve.engines.base import InferenceEngine, Load
from erniekit.serve.prompt_work import PromptWork

EVERY_S = 0.5
STALL_S = 120.0  # without a step of the engine, though it has work: a step of a large model on a CPU takes a minute
LAG_S = 5.0  # that the event loop came too late
LAG_KEPT_S = 10.0  # how long such a lag is reported


class HealthMonitor:
    """Checks the engine and the clock twice a second, in the event loop that answers."""

    def __init__(
        self, engine: InferenceEngine, prompts: PromptWork, stall_s: float = STALL_S, lag_s: float = LAG_S
    ) -> None:
        self.engine, self.prompts, self.stall_s, self.lag_s = engine, prompts, stall_s, lag_s
        self._task: asyncio.Task[None] | None = None
        self._steps, self._moved = -1, time.monotonic()
        self._lags: deque[tuple[float, float]] = deque()  # (when, seconds)

    def start(self) -> None:
        """Once for the running loop; cheap when it runs already."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._moved = time.monotonic()
            self._task = loop.create_task(self._look())

    async def _look(self) -> None:
        while True:
            due = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            now = time.monotonic()
            self._lags.append((now, now - due))
            while self._lags[0][0] < now - LAG_KEPT_S:
                self._lags.popleft()
            self._note(self.engine.load(), now)

    def _note(self, load: Load, now: float) -> None:
        if load.steps != self._steps or not (load.running or load.waiting):
            self._steps, self._moved = load.steps, now

    @property
    def lag(self) -> float:
        """The worst of the last seconds."""
        return max((seconds for _, seconds in self._lags), default=0.0)

    def reason(self, load: Load) -> str | None:
        """Why it cannot answer; nothing while it can."""
        now = time.monotonic()
        self._note(load, now)
        if not load.healthy:
            return "the engine fails"
        if now - self._moved > self.stall_s:
            return f"the engine has made no step for {now - self._moved:.0f} s"
        if self.prompts.load().stuck:
            return "the threads that prepare prompts are beyond their deadline"
        if self.lag > self.lag_s:
            return f"the event loop was held up for {self.lag:.0f} s"
        return None
