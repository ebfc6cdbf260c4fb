"""Time in tests: a clock that only the test moves, and waiting for a state however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOP_S = 0.05  # of the loop below, on the cores for which the tests' limits were written
PATIENCE_S = 60.0  # nothing that works takes as long, on a machine that stands still for seconds too


class Clock:
    """In the place of a module's `time`: monkeypatch.setattr(module, "time", Clock())."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def until(done: Callable[[], object], what: str = "", seconds: float = PATIENCE_S) -> None:
    assert comes_true(done, seconds), f"not within {seconds:g} s: {what}"


def comes_true(done: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


def within(took: float, seconds: float) -> bool:
    """Whether work took at most so much processor time, in terms of the cores for which the limit was written: those of
    one machine differ by a factor of three between days."""

    def loop() -> float:
        began, total = time.process_time(), 0
        for i in range(1_000_000):
            total += i
        return time.process_time() - began

    return took < seconds or took < seconds * max(loop() / LOOP_S for _ in range(3))
