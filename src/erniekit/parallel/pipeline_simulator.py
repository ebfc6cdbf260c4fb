"""A pipeline's action lists against the clock, and whether they can end at all. No torch, no processes.

Called by pipeline_schedule.py (where transfers go), planner/schedule.py (how long ranks wait), pipeline_timeline.py and
the rehearsal. Two kinds of transfer: buffered (a send is given away and the computation goes on) and blocking (a send
and its receive end together, as unbuffered point-to-point calls on one stream do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from erniekit.parallel.pipeline_actions import (
    BACKWARD,
    COMPUTED,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_GRADIENT,
    SENDS,
    WEIGHT,
    Action,
    Order,
)

NOMINAL = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}


class ScheduleStops(ValueError):
    """Ranks wait for each other for ever, or an action needs what is never there."""


class Span(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    ranks: tuple[tuple[Span, ...], ...]  # what each rank did, in order; transfers too where they block

    @property
    def seconds(self) -> float:
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def busy(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.ranks[rank] if span.action.kind in COMPUTED)

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank waits."""
        most = max(self.busy(rank) for rank in range(len(self.ranks)))
        return 1 - most / self.seconds if self.seconds else 0.0


Seconds = Callable[[Action], float]


def nominal(action: Action) -> float:
    return NOMINAL[action.kind]


def simulate(
    orders: Sequence[Order],
    seconds: Seconds = nominal,
    transfer: Sequence[float] | float = 0.0,
    blocking: bool = False,
) -> Timeline:
    """orders: of each rank; computations are enough where transfers do not block. transfer: seconds from stage s to
    the next, or back. blocking: every send waits for its receive, and all that is sent must be received. Raises
    ScheduleStops where it does not end."""
    count = 1 + max(action.stage for order in orders for action in order)
    gaps = [transfer] * count if isinstance(transfer, int | float) else list(transfer)
    run = _Simulation(orders, seconds, gaps, blocking, count)
    while any(run.left(rank) for rank in range(len(orders))):
        # A list, as any() of a generator would stop at the first rank that advances: all do, in every round.
        if not any([run.advance(rank) for rank in range(len(orders))]):
            stuck = [f"rank {r} at {_action_text(order[run.at[r]])}" for r, order in enumerate(orders) if run.left(r)]
            raise ScheduleStops(f"the schedule stops: {'; '.join(stuck)}")
    return Timeline(tuple(map(tuple, run.spans)))


def _action_text(action: Action) -> str:
    return f"{action.kind} of stage {action.stage}, micro-batch {action.micro_batch}"


class _Simulation:
    def __init__(
        self, orders: Sequence[Order], seconds: Seconds, gaps: Sequence[float], blocking: bool, count: int
    ) -> None:
        self.orders, self.seconds, self.gaps, self.blocking, self.count = orders, seconds, gaps, blocking, count
        self.at, self.clock = [0] * len(orders), [0.0] * len(orders)
        self.done: dict[Action, float] = {}
        self.spans: list[list[Span]] = [[] for _ in orders]

    def left(self, rank: int) -> bool:
        return self.at[rank] < len(self.orders[rank])

    def advance(self, rank: int) -> bool:
        """As far as this rank gets by itself; whether it got anywhere."""
        before, order = self.at[rank], self.orders[rank]
        while self.at[rank] < len(order):
            action = order[self.at[rank]]
            if action.kind not in COMPUTED:
                if self.blocking and not self._meet(rank, action):
                    break
                self.at[rank] += not self.blocking  # _meet moves both ends
                continue
            ready = self._ready(action, rank)
            if ready is None:
                break
            self._note(rank, action, max(self.clock[rank], ready), self.seconds(action))
            self.at[rank] += 1
        return self.at[rank] > before

    def _note(self, rank: int, action: Action, start: float, seconds: float) -> None:
        self.clock[rank] = self.done[action] = start + seconds
        self.spans[rank].append(Span(action, start, start + seconds))

    def _meet(self, rank: int, action: Action) -> bool:
        """Both ends of a transfer, where the other one has come to it too."""
        peer = action.peer
        there = peer.stage % len(self.orders)
        if not self.left(there) or self.orders[there][self.at[there]] != peer:
            return False
        sent = action if action.kind in SENDS else peer
        if self._produced(sent) is None:
            raise ScheduleStops(f"{_action_text(sent)} comes before it is computed")
        start = max(self.clock[rank], self.clock[there])
        seconds = self.gaps[min(action.stage, peer.stage)]
        for end, one in ((rank, action), (there, peer)):
            self._note(end, one, start, seconds)
            self.at[end] += 1
        return True

    def _produced(self, sent: Action) -> float | None:
        """When what is sent was computed."""
        if sent.kind != SEND_GRADIENT:
            return self.done.get(Action(FORWARD, sent.stage, sent.micro_batch))
        return self._first_of(sent, BACKWARD, INPUT)

    def _first_of(self, action: Action, *kinds: str) -> float | None:
        for kind in kinds:
            found = self.done.get(Action(kind, action.stage, action.micro_batch))
            if found is not None:
                return found
        return None

    def _ready(self, action: Action, rank: int) -> float | None:
        """When all that a computation needs is there; None: not yet."""
        kind, stage, m = action
        if kind == WEIGHT:
            return self.done.get(Action(INPUT, stage, m))
        if kind == FORWARD:
            return 0.0 if stage == 0 else self._arrived(Action(RECEIVE_ACTIVATION, stage, m), rank)
        own = self.done.get(Action(FORWARD, stage, m))
        if own is None or stage == self.count - 1:
            return own
        return self._arrived(Action(RECEIVE_GRADIENT, stage, m), rank)

    def _arrived(self, received: Action, rank: int) -> float | None:
        sent = received.peer
        local = sent.stage % len(self.orders) == rank  # handed on, not sent
        if self.blocking and not local:
            return self.done.get(received)
        made = self._produced(sent)
        return None if made is None else made + (0.0 if local else self.gaps[min(sent.stage, received.stage)])
