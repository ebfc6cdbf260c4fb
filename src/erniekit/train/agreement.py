"""What all ranks must decide alike: stop after this step, save now. Used by hooks that save, evaluate or stop.

A rank that saves or stops by itself leaves the others waiting in a collective for ever.
"""

from __future__ import annotations

import signal
from typing import Any, Protocol


class HostGroup(Protocol):
    """Ranks that settle small host-side values; with size 1 everything is the identity."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def max(self, value: float, /) -> float: ...

    def gather(self, value: Any, /) -> list[Any]: ...


def agree_on_stop(requested: str | None, world: HostGroup) -> str | None:
    """The signal that any rank received, for every rank; of several the one with the highest number (SIGTERM)."""
    number = int(world.max(signal.Signals[requested].value if requested else 0))
    return signal.Signals(number).name if number else None


def agree_on_stop_or_save(requested: str | None, save: bool, world: HostGroup) -> tuple[str | None, bool]:
    """As above, and whether any rank requests a save, in the same reduction. A stop saves anyway."""
    number = int(world.max(2 * (signal.Signals[requested].value if requested else 0) + save))
    return (signal.Signals(number // 2).name if number > 1 else None), bool(number % 2)
