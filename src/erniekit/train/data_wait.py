"""How long the device is idle because data is late. Used by train/metrics.py and bench/ours.py."""

from __future__ import annotations

from collections import deque


class DataWait:
    """Counts the part of a wait for a step's data in which the device had nothing to do: what overlaps with the step
    before is hidden. Steps are requested in order and finish in order, some of them after the next one is
    requested."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waits: deque[tuple[float, float]] = deque()  # from when to when, of steps that are not finished
        self._finished = 0.0  # when the latest step was

    def request(self, now: float) -> None:
        self._since = now

    def came(self, now: float) -> None:
        """The data arrived, if any was requested."""
        if self._since is not None:
            self._waits.append((self._since, now))
        self._since = None

    def finished(self, at: float) -> float:
        """A step finished: seconds the device was idle before it."""
        requested, came = self._waits.popleft() if self._waits else (at, at)
        idle = max(0.0, came - max(requested, self._finished))
        self._finished = at
        return idle

    def forget(self) -> None:
        """Steps that were begun are dropped."""
        self._waits.clear()
