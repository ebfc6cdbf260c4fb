"""What is recorded of one rank: its calls between ranks in order, and when it waits for each. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

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

    def start(self, call: Call) -> int:
        self.calls.append(call)
        self.events.append(len(self.calls) - 1)
        return len(self.calls) - 1

    def wait(self, number: int) -> None:
        self.events.append(~number)

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
        return Trace(rank, calls, list(self.events))


def span(ranks: tuple[int, ...]) -> str:
    """0-7; 0,8,16; 0,8,...,120 (16 ranks)."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and ranks == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{first},{ranks[1]},...,{last} ({len(ranks)} ranks)"
