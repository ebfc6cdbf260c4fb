"""Whether ranks that make these calls ever wait for each other in a circle. Works on lists of calls only.

A call is started at once and done when its partners have started theirs: a collective when all members have made the
group's next one, a message when its receiver has called recv (no buffer is assumed: what needs one hangs one day).
"""

from __future__ import annotations

from collections.abc import Mapping

from erniekit.rehearse.calls import P2P, Trace, together
from erniekit.rehearse.compare import Mismatch

SHOWN = 8  # waiting ranks that are listed one by one


class _World:
    """Each rank at an event of its own. Calls that belong together have one number, so that whether all partners have
    started theirs is one comparison, however many they are."""

    def __init__(self, traces: Mapping[int, Trace]) -> None:
        self.traces = traces
        self.at = dict.fromkeys(traces, 0)  # the next event of each rank
        self.joint, self.needed = together(traces)
        self.started = [0] * len(self.needed)

    def missing(self, rank: int, number: int) -> list[int]:
        """Ranks that have not started their part of a call."""
        call, joint = self.traces[rank].calls[number], self.joint[rank][number]
        others = (call.peer,) if call.op in P2P else call.group.members
        return [other for other in others if other != rank and not self._has_started(other, joint)]

    def _has_started(self, rank: int, joint: int) -> bool:
        passed = self.traces[rank].events[: self.at[rank]] if rank in self.traces else []
        return any(event >= 0 and self.joint[rank][event] == joint for event in passed)

    def advance(self, rank: int) -> bool:
        """As far as the rank comes. True if that is further than it was."""
        events, joint, first = self.traces[rank].events, self.joint[rank], self.at[rank]
        for at in range(first, len(events)):
            event = events[at]
            if event >= 0:
                self.started[joint[event]] += 1
            elif self.started[joint[~event]] < self.needed[joint[~event]]:
                break
            self.at[rank] = at + 1
        return self.at[rank] > first


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
