"""Whether ranks that make these calls ever wait for each other in a circle. Works on lists of calls only.

A call is started at once and done when its partners have started theirs: a collective when all members have made the
group's next one, a message when its receiver has called recv (no buffer is assumed: what needs one hangs one day).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from erniekit.rehearse.calls import P2P, Call, Trace
from erniekit.rehearse.compare import Mismatch

SHOWN = 8  # waiting ranks that are listed one by one


class _World:
    def __init__(self, traces: Mapping[int, Trace]) -> None:
        self.traces = traces
        self.at = dict.fromkeys(traces, 0)  # the next event of each rank
        self.place: dict[int, list[int]] = {}  # of each call among those of its kind
        self.started: dict[object, int] = defaultdict(int)  # how many of a kind a rank has started
        for rank, trace in traces.items():
            counts: dict[object, int] = defaultdict(int)
            self.place[rank] = []
            for call in trace.calls:
                key = _key(rank, call)
                counts[key] += 1
                self.place[rank].append(counts[key])

    def missing(self, rank: int, number: int) -> list[int]:
        """Ranks that have not started their part of a call."""
        call, place = self.traces[rank].calls[number], self.place[rank][number]
        return [other for other, key in _partners(rank, call) if self.started[key] < place]

    def advance(self, rank: int) -> bool:
        """As far as the rank comes. True if that is further than it was."""
        trace, moved = self.traces[rank], False
        while self.at[rank] < len(trace.events):
            event = trace.events[self.at[rank]]
            if event >= 0:
                self.started[_key(rank, trace.calls[event])] += 1
            elif self.missing(rank, ~event):
                break
            self.at[rank] += 1
            moved = True
        return moved


def _key(rank: int, call: Call) -> object:
    if call.op in P2P:
        return call.op, call.group, rank, call.peer, call.tag
    return call.group, rank


def _partners(rank: int, call: Call) -> list[tuple[int, object]]:
    """Who must have started what, as often as this rank."""
    if call.op in P2P:
        other = "recv" if call.op == "send" else "send"
        return [(call.peer, (other, call.group, call.peer, rank, call.tag))]
    return [(member, (call.group, member)) for member in call.group.members if member != rank]


def deadlock(traces: Mapping[int, Trace]) -> Mismatch | None:
    """Where the ranks come to stand, if they do not all reach their end."""
    world = _World(traces)
    while any([world.advance(rank) for rank in traces]):
        pass
    stuck = [rank for rank, trace in traces.items() if world.at[rank] < len(trace.events)]
    if not stuck:
        return None
    waits = {rank: ~traces[rank].events[world.at[rank]] for rank in stuck}
    circle = _circle({rank: world.missing(rank, number) for rank, number in waits.items()})
    lines = []
    for rank in (circle or stuck)[:SHOWN]:
        call, others = traces[rank].calls[waits[rank]], world.missing(rank, waits[rank])
        ended_ranks = [other for other in others if other not in waits]
        ended = " (which has ended)" if ended_ranks == others else ""
        lines.append(f"rank {rank} waits for rank {(ended_ranks or others)[0]}{ended}: {call.with_line()}")
    what = "ranks wait for each other in a circle" if circle else "a rank waits for a call that never comes"
    return Mismatch(tuple(circle or stuck), f"deadlock: {what}", tuple(lines))


def _circle(waits: dict[int, list[int]]) -> list[int]:
    """Ranks each of which waits for the next, the last for the first; empty: there is no such circle."""
    for start in waits:
        path: list[int] = []
        rank = start
        while rank in waits and rank not in path:
            path.append(rank)
            rank = next((other for other in waits[rank] if other in waits), -1)
        if rank in path:
            return path[path.index(rank) :]
    return []
