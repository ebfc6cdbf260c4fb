"""Which ranks of a layout are alike, so that one of them is recorded for all: they hold tensors of the same shapes and
differ in the packs they read, or in their place among tensor-parallel ranks, the first of which is a kind of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import chain, combinations

from erniekit.parallel.layout import AXES, EXPERT_AXES, Layout
from erniekit.rehearse.calls import RankGroup, Trace

Key = Callable[[int], Hashable]


def kinds(layout: Layout, shapes: Callable[[int], Hashable]) -> list[list[int]]:
    """All ranks, those that are alike together. shapes(rank): of the tensors it holds."""
    found: dict[Hashable, list[int]] = {}
    for rank in range(layout.size):
        at = layout.coords(rank)
        found.setdefault((at["pp"], at["cp"], at["tp"] == 0, shapes(rank)), []).append(rank)
    out = list(found.values())
    if len(out) == 1 and layout.size > 1:  # or nothing would be compared
        return [out[0][:-1], out[0][-1:]]
    return out


def everyone(layout: Layout, recorded: Mapping[int, Trace], alike: list[list[int]]) -> dict[int, Trace]:
    """Traces of all ranks from those of the first of each kind."""
    parts = Parts(layout)
    out = {}
    for first, *others in alike:
        out[first] = recorded[first]
        for rank in others:
            out[rank] = recorded[first].of(rank, lambda group, rank=rank: parts.with_rank(group, rank))  # type: ignore[misc]
    return dict(sorted(out.items()))


class Parts:
    """The ways in which a layout's ranks are parted into groups, and a group's counterpart for another rank."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size
        self._keys = list(_keys(layout))
        self._found: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}

    def with_rank(self, group: RankGroup, rank: int) -> RankGroup:
        return RankGroup(self._parted(group.members)[rank], group.number)

    def _parted(self, members: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Rank -> its part, of the parting that has `members` as one part."""
        if members not in self._found:
            for key in self._keys:
                parted: dict[Hashable, list[int]] = {}
                for rank in range(self.size):
                    parted.setdefault(key(rank), []).append(rank)
                if tuple(parted.get(key(members[0]), ())) == members:
                    self._found[members] = {r: tuple(p) for p in parted.values() for r in p}
                    break
            else:
                raise LookupError(f"ranks {members} are not a group of this layout")
        return self._found[members]


def _keys(layout: Layout) -> Iterator[Key]:
    """Ranks with the same key are a group, as World makes them."""
    for axes in chain.from_iterable(combinations(AXES, n) for n in range(1, len(AXES) + 1)):
        yield partial(_outside, layout, axes)
    if layout.experts_over != "none":
        for same in (0, 1):  # which place among those that hold all experts, which copy
            yield partial(_of_experts, layout, same)
    ends = (0, layout.pp - 1)

    def ends_of_pipelines(rank: int) -> Hashable:
        at = layout.coords(rank)
        rest = tuple(c for a, c in at.items() if a != "pp")
        return rest if at["pp"] in ends else (rest, at["pp"])

    yield ends_of_pipelines


def _outside(layout: Layout, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Where a rank is on all other axes."""
    return tuple(c for a, c in layout.coords(rank).items() if a not in axes)


def _of_experts(layout: Layout, same: int, rank: int) -> tuple[int, ...]:
    return (*_outside(layout, EXPERT_AXES[layout.experts], rank), layout.expert_place(rank)[same])
