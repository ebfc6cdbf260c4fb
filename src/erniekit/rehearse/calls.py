"""What is recorded of one rank: its calls between ranks in order, and when it waits for each. No torch in here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from erniekit.rehearse.moments import Moments

P2P = ("send", "recv")


@dataclass(frozen=True)
class RankGroup:
    members: tuple[int, ...]  # ranks of the world
    number: int = 0  # which of the groups with just these members, in the order they were made

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a group may have thousands of members, and every call is looked up by its group."""
        return hash((self.members, self.number))

    def describe(self) -> str:
        return f"ranks {span(self.members)}" + (f" (group {self.number + 1} of these)" if self.number else "")


@dataclass(frozen=True)
class Call:
    op: str
    group: RankGroup
    shape: tuple[int, ...] = ()  # of what this rank gives, or of what it has room for
    dtype: str = ""
    detail: str = ""  # which reduction, or whose value: the same on all ranks
    peer: int = -1  # of send and recv: a rank of the world
    tag: int = 0
    sent: tuple[int, ...] = ()  # of all_to_all: rows for each rank of the group
    got: tuple[int, ...] = ()
    source: str = ""  # file:line

    def describe(self) -> str:
        """all_reduce bf16 [2, 8] (sum)."""
        parts = [self.op, self.dtype, str(list(self.shape)) if self.dtype else ""]
        parts += [f"({self.detail})"] if self.detail else []
        parts += [f"{'to' if self.op == 'send' else 'from'} rank {self.peer}"] if self.op in P2P else []
        return " ".join(part for part in parts if part)

    def with_line(self) -> str:
        return f"{self.describe()} at {self.source or 'an unknown line'}"


@dataclass
class Trace:
    """One rank's run. events: k >= 0 starts calls[k]; ~k waits until calls[k] is done."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    moments: Moments | None = None  # of its step, for a timeline

    def start(self, call: Call) -> int:
        self.calls.append(call)
        self.events.append(len(self.calls) - 1)
        if self.moments is not None:
            self.moments.start(len(self.calls) - 1)
        return len(self.calls) - 1

    def wait(self, number: int) -> None:
        self.events.append(~number)
        if self.moments is not None:
            self.moments.wait(number)

    def blocking(self, call: Call) -> None:
        self.wait(self.start(call))

    def of(self, rank: int, group_of: Callable[[RankGroup], RankGroup]) -> Trace:
        """What a rank like this one would record. group_of: its group in the place of this one's; a peer keeps its
        place in the group."""
        mapped: dict[RankGroup, RankGroup] = {}
        calls = []
        for call in self.calls:
            group = mapped.setdefault(call.group, mapped.get(call.group) or group_of(call.group))
            peer = group.members[call.group.members.index(call.peer)] if call.op in P2P else -1
            calls.append(replace(call, group=group, peer=peer))
        return Trace(rank, calls, list(self.events), self.moments)


def together(traces: Mapping[int, Trace]) -> tuple[dict[int, list[int]], list[int]]:
    """Calls that belong together have one number: (of each rank's calls, of each number how many ranks take part)."""
    numbers: dict[object, int] = {}
    joint: dict[int, list[int]] = {}
    needed: list[int] = []
    for rank, trace in traces.items():
        counts: dict[object, int] = defaultdict(int)
        own = joint[rank] = []
        for call in trace.calls:
            key = order_of(rank, call)
            counts[call.op if call.op in P2P else "", key] += 1
            one = key, counts[call.op if call.op in P2P else "", key]
            if one not in numbers:
                numbers[one] = len(needed)
                needed.append(2 if call.op in P2P else len(call.group.members))
            own.append(numbers[one])
    return joint, needed


def order_of(rank: int, call: Call) -> object:
    """Equal for the calls of all ranks that belong together, but for how many there were before: those that come one
    after the other."""
    if call.op in P2P:
        ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
        return call.group, ends, call.tag
    return call.group


def span(ranks: tuple[int, ...]) -> str:
    """0-7; 0,8,16; 0,8,...,120 (16 ranks)."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and ranks == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{first},{ranks[1]},...,{last} ({len(ranks)} ranks)"
