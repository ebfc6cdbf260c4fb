"""Where a layout is planned. Used by evaluate.py and step_time.py; plans hand it to search.py."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.planner.cards import Card, CardRates
from erniekit.planner.memory import USABLE


@dataclass(frozen=True)
class DevicePool:
    """The like devices that a layout is spread over."""

    card: Card
    rates: CardRates
    devices: int  # of a machine
    limit: float = 0.0  # bytes a rank may take; 0: what is usable of the card

    @property
    def room(self) -> float:
        return self.limit or USABLE * self.card.memory
