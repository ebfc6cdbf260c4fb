"""How long a run stands still for want of data. Used by train/metrics.py and bench/ours.py."""

from __future__ import annotations

from collections import deque


class DataWait:
    """Of waiting for a step's data that part counts in which the device had nothing to do: what came before the step
    before was finished is hidden. Steps are asked for in order and finish in order, some of them later than the next
    one is asked for."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waits: deque[tuple[float, float]] = deque()  # from when to when, of steps that are not finished
        self._finished = 0.0  # when the latest step was

    def ask(self, now: float) -> None:
        self._since = now

    def came(self, now: float) -> None:
        """Data, if any was asked for."""
        if self._since is not None:
            self._waits.append((self._since, now))
        self._since = None

    def finished(self, at: float) -> float:
        """A step is: seconds that nothing was done before it."""
        asked, came = self._waits.popleft() if self._waits else (at, at)
        idle = max(0.0, came - max(asked, self._finished))
        self._finished = at
        return idle

    def forget(self) -> None:
        """Steps that were begun are dropped."""
        self._waits.clear()
