"""What all ranks must decide alike: skip this update, stop after this step. Used by hooks that skip, save or stop.

A rank that skips or stops alone leaves the others waiting in a collective for ever.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class HostGroup(Protocol):
    """Ranks that settle small host-side values; with size 1 everything is the identity."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def max(self, value: float, /) -> float: ...

    def sum(self, value: float, /) -> float: ...

    def gather(self, value: Any, /) -> list[Any]: ...


def decide_finite(values: Iterable[float], world: HostGroup) -> bool:
    """True on every rank when all values of all ranks are numbers; False on every rank otherwise."""
    return world.max(0 if _all_finite(values) else 1) == 0


def agree_on_stop(requested: str | None, world: HostGroup) -> str | None:
    """The signal that any rank received, for every rank; of several the one with the highest number (SIGTERM)."""
    number = int(world.max(signal.Signals[requested].value if requested else 0))
    return signal.Signals(number).name if number else None


def agree_on_stop_or_save(requested: str | None, save: bool, world: HostGroup) -> tuple[str | None, bool]:
    """As above, and whether any rank wants a save, in the same reduction. A stop saves anyway."""
    number = int(world.max(2 * (signal.Signals[requested].value if requested else 0) + save))
    return (signal.Signals(number // 2).name if number > 1 else None), bool(number % 2)


@dataclass(frozen=True)
class Agreed:
    finite: bool  # every value of every rank is a number: the update may be applied
    stop: str | None  # the signal to obey at the end of this step


class StepAgreement:
    """Both questions in one small reduction a step; which signal it was is asked only once there is one."""

    def __init__(self, world: HostGroup) -> None:
        self.world = world

    def __call__(self, values: Iterable[float], requested: str | None) -> Agreed:
        """`requested` is read once, here: a signal that comes later is for the next step, on all ranks."""
        # Two digits to the base size + 1: ranks with a bad value, ranks asked to stop. Exact in a float64 sum.
        base = self.world.size + 1
        total = self.world.sum(float((not _all_finite(values)) + base * (requested is not None)))
        asked, bad = divmod(int(total), base)
        return Agreed(bad == 0, agree_on_stop(requested, self.world) if asked else None)


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)
