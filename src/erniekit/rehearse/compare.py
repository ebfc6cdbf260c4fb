"""Whether the ranks' calls belong together: each group's calls alike on all its members, every send received.

Works on lists of calls only, whatever made them. Each group is reported once, at its first fault: what follows a
skipped call is shifted, and would only repeat it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from erniekit.printable import counted
from erniekit.rehearse.calls import P2P, Call, RankGroup, Trace, span


@dataclass(frozen=True)
class Mismatch:
    ranks: tuple[int, ...]  # whose calls are not as they should be
    what: str
    lines: tuple[str, ...] = ()  # the calls in question

    def text(self) -> list[str]:
        return [self.what, *(f"  {line}" for line in self.lines)]


def compare(traces: Mapping[int, Trace]) -> list[Mismatch]:
    """traces: of every rank that is a member of any group."""
    return [*_collectives(traces), *_messages(traces)]


def _collectives(traces: Mapping[int, Trace]) -> Iterable[Mismatch]:
    made: dict[RankGroup, dict[int, list[Call]]] = defaultdict(dict)
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.op not in P2P:
                made[call.group].setdefault(rank, []).append(call)
    for group, by_rank in made.items():
        lists = {rank: by_rank.get(rank, []) for rank in group.members}
        finding = _first_difference(group, lists)
        if finding is not None:
            yield finding


def _first_difference(group: RankGroup, lists: dict[int, list[Call]]) -> Mismatch | None:
    longest = max(map(len, lists.values()))
    for k in range(longest):
        here = {rank: calls[k] if k < len(calls) else None for rank, calls in lists.items()}
        kinds = {rank: _kind(call) for rank, call in here.items()}
        if len(set(kinds.values())) > 1:
            return _differs(group, k, here, kinds)
        finding = _rows_travel(group, k, {rank: call for rank, call in here.items() if call is not None})
        if finding is not None:
            return finding
    return None


def _kind(call: Call | None) -> tuple[object, ...]:
    """What must be the same on all members."""
    if call is None:
        return ()
    return call.op, call.shape[1:] if call.sent or call.got else call.shape, call.dtype, call.detail


def _differs(group: RankGroup, k: int, here: dict[int, Call | None], kinds: dict[int, tuple[object, ...]]) -> Mismatch:
    """Names the minority; of two kinds equally frequent the one without a call, else the later."""
    counts = Counter(kinds.values())
    usual = max(counts, key=lambda kind: (counts[kind], bool(kind), -min(r for r in kinds if kinds[r] == kind)))
    odd = tuple(rank for rank in group.members if kinds[rank] != usual)
    lines, shown = [], set()
    for rank in (*odd, *(r for r in group.members if r not in odd)):
        if kinds[rank] not in shown:
            shown.add(kinds[rank])
            alike = tuple(r for r in group.members if kinds[r] == kinds[rank])
            call = here[rank]
            text = call.with_line() if call is not None else "makes no further call in this group"
            lines.append(f"{_named(alike)}: {text}")
    return Mismatch(odd, f"{_named(odd)} differs in call {k + 1} of group {group.describe()}", tuple(lines))


def _rows_travel(group: RankGroup, k: int, here: dict[int, Call]) -> Mismatch | None:
    """all_to_all: what one sends another must have room for."""
    for rank, call in here.items():
        for place, rows in enumerate(call.sent):
            other = group.members[place]
            room = here[other].got[group.members.index(rank)]
            if rows != room:
                return Mismatch(
                    (rank, other),
                    f"rank {rank} sends {counted(rows, 'row')} to rank {other}, which has room for {room}, in call "
                    f"{k + 1} of group {group.describe()}",
                    (f"rank {rank}: {call.with_line()}", f"rank {other}: {here[other].with_line()}"),
                )
    return None


def _messages(traces: Mapping[int, Trace]) -> Iterable[Mismatch]:
    """Each pair's messages in order, one way; those of a group and a tag are apart from others."""
    sent: dict[tuple[RankGroup, int, int, int], list[Call]] = defaultdict(list)
    received: dict[tuple[RankGroup, int, int, int], list[Call]] = defaultdict(list)
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.op == "send":
                sent[call.group, rank, call.peer, call.tag].append(call)
            elif call.op == "recv":
                received[call.group, call.peer, rank, call.tag].append(call)
    for key in dict.fromkeys((*sent, *received)):
        _, source, target, _ = key
        gives, takes = sent[key], received[key]
        for k, (give, take) in enumerate(zip(gives, takes)):
            if (give.shape, give.dtype) != (take.shape, take.dtype):
                yield Mismatch(
                    (source, target),
                    f"message {k + 1} from rank {source} to rank {target} is not what is expected",
                    (f"rank {source}: {give.with_line()}", f"rank {target}: {take.with_line()}"),
                )
                break
        else:
            few = min(len(gives), len(takes))
            if len(gives) != len(takes):
                extra, caller = (gives[few], source) if len(gives) > few else (takes[few], target)
                other = target if caller == source else source
                lack = "never receives" if caller == source else "never sends"
                yield Mismatch(
                    (caller, other),
                    f"rank {other} {lack} message {few + 1} from rank {source} to rank {target}",
                    (f"rank {caller}: {extra.with_line()}",),
                )


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {span(ranks)}"
