"""What a timeline needs of one rank's step beside its calls: how much is computed between them, and on which stream.

Filled by counting.py while the step is recorded, read by timing.py. Streams are numbered, 0 is the one that computes;
the host is taken to be ahead of all of them, as it is of a card. No torch in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

COMPUTES = 0
WORK, START, WAIT, AFTER = "work", "start", "wait", "after"


@dataclass
class CountedWork:
    """products, experts, attention: FLOPs; passes, update: bytes read and written."""

    products: float = 0.0
    experts: float = 0.0
    passes: float = 0.0  # between products
    update: float = 0.0  # of weights, gradients and the optimiser's states
    attention: dict[int, float] = field(default_factory=dict)  # by the number of keys that a query may look at

    def __bool__(self) -> bool:
        return bool(self.products or self.experts or self.passes or self.update or self.attention)


class Moment(NamedTuple):
    """work: it is computed; start, wait: of a call; after: the stream goes on when moment `number` is over."""

    kind: str
    stream: int
    number: int = -1
    work: CountedWork | None = None


class Moments:
    """One rank's, in the order in which its host made them."""

    def __init__(self) -> None:
        self.on = False  # False until the step begins
        self.stream = COMPUTES
        self.made: list[Moment] = []
        self._last: dict[int, int] = {}  # of each stream
        self._work = CountedWork()

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        self._close()
        self.on = False

    @property
    def work(self) -> CountedWork:
        """What is being computed on the present stream: added to in place."""
        return self._work

    def start(self, number: int) -> None:
        self._add(START, self.stream, number)

    def wait(self, number: int) -> None:
        self._add(WAIT, self.stream, number)

    def switch(self, stream: int) -> int:
        """What follows is on that stream; returns the one before."""
        self._close()
        before, self.stream = self.stream, stream
        return before

    def record(self, stream: int) -> int:
        """The place a stream has come to, for `after`; below 0: nothing is on it yet."""
        self._close()
        return self._last.get(stream, -1)

    def after(self, stream: int, place: int) -> None:
        """The stream goes on when the place is reached."""
        if place >= 0 and self.made[place].stream != stream:
            self._add(AFTER, stream, place)

    def _add(self, kind: str, stream: int, number: int, work: CountedWork | None = None) -> None:
        if self.on:
            if kind != WORK:
                self._close()
            self._last[stream] = len(self.made)
            self.made.append(Moment(kind, stream, number, work))

    def _close(self) -> None:
        if self._work:
            done, self._work = self._work, CountedWork()
            self._add(WORK, self.stream, -1, done)
