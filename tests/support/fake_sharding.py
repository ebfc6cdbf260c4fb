"""Any cut of any tensor over ranks, in the terms of parallel/sharding.py: for tests of what moves tensors about.

Rows and columns are lists of ranges, so a rank may hold several stretches, another rank's as well, or nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from erniekit.parallel.sharding import Box

Range = tuple[int, int]


@dataclass(frozen=True)
class Held:
    """A rank's local tensor: these rows of the whole, end to end, of these columns (None: all), and `rim` rows more."""

    rows: tuple[Range, ...]
    columns: tuple[Range, ...] | None = None
    rim: int = 0  # rows of padding that belong to no one


class FakeSharding:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, list[Held | None]]) -> None:
        self.shapes, self.held = dict(shapes), held

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        held = self.held[name][rank]
        if held is None:
            return ()
        ranges = [held.rows] + ([held.columns or ((0, self.shapes[name][1]),)] if len(self.shapes[name]) > 1 else [])
        out = []
        for pairs in itertools.product(*(zip(dim, _ends(dim)) for dim in ranges)):
            there = tuple(slice(a, b) for (a, b), _ in pairs)
            here = tuple(slice(end - (b - a), end) for (a, b), end in pairs)
            if all(a < b for (a, b), _ in pairs):
                out.append(Box(there, here))
        return tuple(out)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        held = self.held[name][rank]
        if held is None:
            return (0, *self.shapes[name][1:])
        rows = (_ends(held.rows) or [0])[-1] + held.rim
        if len(self.shapes[name]) == 1:
            return (rows,)
        return (rows, _ends(held.columns)[-1] if held.columns else self.shapes[name][1])

    def holders(self, name: str) -> list[tuple[int, tuple[Box, ...]]]:
        taken = torch.zeros(self.shapes[name], dtype=torch.bool)
        out = []
        for rank in range(len(self.held[name])):
            kept: list[Box] = []
            for box in self.boxes(name, rank):
                kept += _untaken(box, taken)
                taken[box.global_slices] = True
            if kept:
                out.append((rank, tuple(kept)))
        assert bool(taken.all()), f"nobody holds all of {name}"
        return out

    def local(self, name: str, rank: int, whole: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self.local_shape(name, rank), dtype=whole.dtype)
        for box in self.boxes(name, rank):
            out[box.local_slices] = whole[box.global_slices]
        return out


def random_sharding(shapes: Mapping[str, tuple[int, ...]], ranks: int, seed: int) -> FakeSharding:
    """Each tensor cut in one of many ways: rows, columns, both, stretches of fused rows, uneven, empty, repeated."""
    draw = random.Random(seed)
    return FakeSharding(shapes, {name: _cut(shape, ranks, draw) for name, shape in shapes.items()})


def _cut(shape: tuple[int, ...], ranks: int, draw: random.Random) -> list[Held | None]:
    whole = ((0, shape[0]),)
    kind = draw.choice(["rows", "columns", "grid", "stretches", "repeated", "everywhere", "one"])
    if len(shape) == 1 and kind in ("columns", "grid"):
        kind = "rows"
    if kind == "rows":
        return [Held((r,), rim=draw.choice((0, 0, 2))) for r in _split(shape[0], ranks, draw)]
    if kind == "columns":
        return [Held(whole, (c,)) for c in _split(shape[1], ranks, draw)]
    if kind == "grid" and ranks % 2 == 0:
        pairs = itertools.product(_split(shape[0], 2, draw), _split(shape[1], ranks // 2, draw))
        return [Held((r,), (c,)) for r, c in pairs]
    if kind == "stretches":  # a fused weight: each rank has a stretch of every part
        middle = draw.randrange(shape[0] + 1)
        parts = [_split(middle, ranks, draw), _split(shape[0] - middle, ranks, draw)]
        return [Held((a, (middle + b[0], middle + b[1]))) for a, b in zip(*parts)]
    if kind == "repeated":  # neighbours share rows, as key heads that several ranks need
        cuts = _split(shape[0], ranks, draw)
        return [Held(((max(0, a - 2), b),)) for a, b in cuts]
    if kind == "everywhere":
        return [Held(whole)] * ranks
    keeper = draw.randrange(ranks)  # a pipeline stage's own tensor
    return [Held(whole) if rank == keeper else None for rank in range(ranks)]


def _split(count: int, parts: int, draw: random.Random) -> list[Range]:
    cuts = sorted(draw.randrange(count + 1) for _ in range(parts - 1))
    return list(zip([0, *cuts], [*cuts, count]))


def _ends(ranges: tuple[Range, ...]) -> list[int]:
    return list(itertools.accumulate(b - a for a, b in ranges))


def _untaken(box: Box, taken: torch.Tensor) -> list[Box]:
    """The rows of a box that no earlier rank has; every row is taken whole or not at all here."""
    free = [not bool(row.any()) for row in taken[box.global_slices].reshape(_rows(box), -1)]
    out, start = [], 0
    for isfree, group in itertools.groupby(free):
        count = len(list(group))
        if isfree:
            moved = [
                slice(s[0].start + start, s[0].start + start + count) for s in (box.global_slices, box.local_slices)
            ]
            out.append(Box((moved[0], *box.global_slices[1:]), (moved[1], *box.local_slices[1:])))
        start += count
    return out


def _rows(box: Box) -> int:
    return box.global_slices[0].stop - box.global_slices[0].start
