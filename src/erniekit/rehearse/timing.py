"""When each rank of a recorded step computes, transfers and waits: the calls and the work between them played through
with the rates of a cluster. No torch in here. Called by recipes/rehearsed_timeline.py.

A call begins when all its partners have come to it and the group's call before it is over; it takes a latency and its
bytes over the link. A stream that waits for it goes on when it is over. Groups do not share a link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

from erniekit.intervals import both, joined, length
from erniekit.rehearse.calls import P2P, Call, Trace, order_of, together
from erniekit.rehearse.moments import COMPUTES, START, WAIT, WORK, CountedWork, Moment

COPIES = "copies"  # before and after a transfer, on its own stream
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}  # others: 1


class StepRates(Protocol):
    """Of the cluster that ranks are placed on."""

    latency: float  # seconds of a call

    def seconds(self, rank: int, work: CountedWork) -> float: ...

    def link(self, members: Sequence[int]) -> float:
        """Bytes a second each way between these ranks."""
        ...


class TimeSpan(NamedTuple):
    start: float
    end: float
    what: str = ""  # of a transfer: all_gather, ...
    call: Call | None = None  # as this rank made it


@dataclass
class RankTimes:
    """One rank's step in seconds from its beginning; `step` is the same for all ranks."""

    rank: int
    step: float
    computing: list[TimeSpan] = field(default_factory=list)
    transfers: list[TimeSpan] = field(default_factory=list)

    @property
    def end(self) -> float:
        return max((span.end for span in (*self.computing, *self.transfers)), default=0.0)

    @property
    def computed(self) -> float:
        return length(self.computing)

    @property
    def communication(self) -> float:
        """While anything is transferred."""
        return length(joined(self.transfers))

    @property
    def hidden(self) -> float:
        """Of it, while the rank computes."""
        return length(both(joined(self.transfers), self.computing))

    @property
    def exposed(self) -> float:
        return self.communication - self.hidden

    @property
    def waiting(self) -> float:
        """For other ranks: neither computes nor transfers, the end of the step included."""
        return max(0.0, self.step - self.computed - self.exposed)

    def stalls(self) -> list[TimeSpan]:
        """While it does not compute."""
        edges = [0.0, *(edge for span in self.computing for edge in span[:2]), self.step]
        return [TimeSpan(a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]


def timed(traces: Mapping[int, Trace], rates: StepRates) -> dict[int, RankTimes]:
    """traces: of all ranks, with moments; they match, and none waits for ever."""
    run = _Run(traces, rates)
    todo = list(traces)
    while todo:
        todo += run.advance(todo.pop())
    stuck = [rank for rank in traces if run.at[rank] < len(run.moments[rank])]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for ever")
    step = max((times.end for times in run.times.values()), default=0.0)
    step = max(step, *(max(tails.values(), default=0.0) for tails in run.tails.values()))
    for times in run.times.values():
        times.step = step
    return run.times


def slowest(times: Iterable[RankTimes]) -> RankTimes:
    """The one that waits least for others: what the rest wait for."""
    return min(times, key=lambda one: (round(one.waiting / (one.step or 1.0), 6), one.rank))


class _Run:
    def __init__(self, traces: Mapping[int, Trace], rates: StepRates) -> None:
        self.traces, self.rates = traces, rates
        self.moments = {rank: trace.moments.made if trace.moments else [] for rank, trace in traces.items()}
        self.times = {rank: RankTimes(rank, 0.0) for rank in traces}
        self.at = dict.fromkeys(traces, 0)
        self.tails: dict[int, dict[int, float]] = {rank: defaultdict(float) for rank in traces}
        self.over: dict[int, list[float]] = {rank: [] for rank in traces}  # when each moment was
        self.joint, self.needed = together(traces)
        self.started: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a joint call: rank, its own number
        self.ready: dict[int, float] = defaultdict(float)
        self.ends: dict[int, float] = {}
        self.free: dict[object, float] = defaultdict(float)  # when the last call of a group ends
        self.waiting: dict[int, list[int]] = defaultdict(list)

    def advance(self, rank: int) -> list[int]:
        """As far as the rank comes; the ranks that may go on thereafter."""
        woken: list[int] = []
        moments, tails, over = self.moments[rank], self.tails[rank], self.over[rank]
        for at in range(self.at[rank], len(moments)):
            moment = moments[at]
            now = tails[moment.stream]
            if moment.kind == WORK:
                now = self._work(rank, moment, now)
            elif moment.kind == START:
                woken += self._start(rank, moment.number, now)
            elif moment.kind == WAIT:
                joint = self.joint[rank][moment.number]
                if joint not in self.ends:
                    self.waiting[joint].append(rank)
                    return woken
                now = max(now, self.ends[joint])
            else:
                now = max(now, over[moment.number])
            tails[moment.stream] = now
            over.append(now)
            self.at[rank] = at + 1
        return woken

    def _work(self, rank: int, moment: Moment, now: float) -> float:
        assert moment.work is not None
        end = now + self.rates.seconds(rank, moment.work)
        times = self.times[rank]
        if moment.stream != COMPUTES:
            times.transfers.append(TimeSpan(now, end, COPIES))
        elif times.computing and times.computing[-1].end == now:
            times.computing[-1] = TimeSpan(times.computing[-1].start, end)
        else:
            times.computing.append(TimeSpan(now, end))
        return end

    def _start(self, rank: int, number: int, now: float) -> list[int]:
        joint = self.joint[rank][number]
        self.started[joint].append((rank, number))
        self.ready[joint] = max(self.ready[joint], now)
        if len(self.started[joint]) < self.needed[joint]:
            return []
        order = order_of(rank, self.traces[rank].calls[number])
        begin = max(self.ready[joint], self.free[order])
        parts = [(one, self.traces[one].calls[k]) for one, k in self.started.pop(joint)]
        unlike = parts if parts[0][1].op == "all_to_all" else parts[:1]
        end = begin + max(duration(one, call, self.rates) for one, call in unlike)
        self.ends[joint] = self.free[order] = end
        for one, call in parts:
            self.times[one].transfers.append(TimeSpan(begin, end, call.op, call))
        return self.waiting.pop(joint, [])


def duration(rank: int, call: Call, rates: StepRates) -> float:
    """Seconds from when all partners are there."""
    members = (rank, call.peer) if call.op in P2P else call.group.members
    if len(members) < 2:
        return 0.0
    sent = volume(rank, call)
    return rates.latency + (sent / rates.link(members) if sent else 0.0)


def volume(rank: int, call: Call) -> float:
    """Bytes that go over this rank's link, one way: of rings, in which every rank sends as much as it gets."""
    ranks, each = len(call.group.members), float(BYTES.get(call.dtype, 1))
    size = prod(call.shape) * each if call.dtype else 0.0  # barriers and the host's own values are of no size
    if call.op == "all_reduce":
        return 2 * (ranks - 1) / ranks * size
    if call.op in ("all_gather", "reduce_scatter"):
        return (ranks - 1) * size  # of one rank's part
    if call.op == "all_to_all":
        place = call.group.members.index(rank)
        rows = max(sum(given) - given[place] for given in (call.sent, call.got))
        return rows * prod(call.shape[1:]) * each
    return size


def in_order(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    return sorted(spans, key=lambda span: span[:2])
