"""Sharding: which part of every tensor each rank holds, as pure data. The one source for training, loading and saving.

Computed from the model's plan and the layout; nobody needs to ask another rank. See plan.py for the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from erniekit.parallel.mesh import Layout
from erniekit.parallel.plan import HeadShare, Plan, Range, head_share, rule_of, share

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The same block, seen in the whole tensor and in a rank's local one."""

    global_slices: tuple[slice, ...]
    local_slices: tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """Along `dim` a rank holds `ranges` of the whole tensor, end to end in this order."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Heads:
    """What the plan must know of the attention: counts only."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Sharding:
    def __init__(
        self,
        shapes: Mapping[str, Shape],
        plan: Plan,
        heads: Heads,
        layout: Layout,
        num_layers: int,
        tied: bool,
        part_rows: Mapping[str, tuple[tuple[str, int], ...]],
    ) -> None:
        """shapes: every parameter of the whole model by our names (adapters too). part_rows: for each fused linear the
        public parts and their rows, and for each `<linear>.lora.<key>` those its B covers."""
        self.shapes, self.plan, self.heads, self.layout = dict(shapes), plan, heads, layout
        self.num_layers, self.tied, self.part_rows = num_layers, tied, part_rows

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> Shape:
        return self.shapes[name]

    # --- pipeline: who has a layer ---

    def stages(self) -> list[range]:
        """The layers of each stage, in order; a rank has every pp-th of them."""
        count = self.layout.pp * self.layout.virtual_stages
        if self.layout.stage_cuts:
            bounds = [0, *self.layout.stage_cuts, self.num_layers]
        else:
            bounds = [share(self.num_layers, count, s)[0] for s in range(count)] + [self.num_layers]
        return [range(a, b) for a, b in pairwise(bounds)]

    def stages_of(self, name: str) -> tuple[int, ...]:
        last = self.layout.pp * self.layout.virtual_stages - 1
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            return tuple(s for s, layers in enumerate(self.stages()) if layer in layers)
        if name.startswith("embed."):
            return (0, last) if self.tied and last else (0,)
        return (last,)

    def pp_ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(s % self.layout.pp for s in self.stages_of(name)))

    # --- tensor parallel: which rows or columns ---

    def head_share(self, tp_rank: int) -> HeadShare:
        return head_share(self.heads.num_heads, self.heads.num_kv_heads, self.layout.tp, tp_rank)

    def cut(self, name: str, tp_rank: int) -> Cut | None:
        """None: the whole tensor on every tensor-parallel rank."""
        if self.layout.tp == 1:
            return None
        module, _, leaf = name.rpartition(".")
        if ".lora." in name:
            return self._adapter_cut(name, tp_rank)
        rule = rule_of(self.plan, module or name)
        rows = self.shapes[name][0]
        if rule.kind == "heads":
            return Cut(0, self._head_rows(tp_rank))
        if rule.kind in ("column", "vocab"):
            width = rows // rule.parts
            start, stop = share(width, self.layout.tp, tp_rank)
            return Cut(0, tuple((p * width + start, p * width + stop) for p in range(rule.parts)))
        if leaf == "bias" or rule.kind == "replicate":
            return None
        return Cut(1, (self._columns(rule.kind, self.shapes[name][1], tp_rank),))

    def _head_rows(self, tp_rank: int) -> tuple[Range, ...]:
        h, mine = self.heads, self.head_share(tp_rank)
        q, kv, D = h.num_heads * h.head_dim, h.num_kv_heads * h.head_dim, h.head_dim
        spans = ((0, mine.queries), (q, mine.kvs), (q + kv, mine.kvs))
        return tuple((base + a * D, base + b * D) for base, (a, b) in spans)

    def _columns(self, kind: str, width: int, tp_rank: int) -> Range:
        if kind == "heads_in":
            a, b = self.head_share(tp_rank).queries
            return a * self.heads.head_dim, b * self.heads.head_dim
        return share(width, self.layout.tp, tp_rank)

    def _adapter_cut(self, name: str, tp_rank: int) -> Cut | None:
        """`<linear>.lora.<part | shared>.<A | B>`: B follows its linear's rows, A its columns; the other is whole."""
        module, _, rest = name.partition(".lora.")
        part, side = rest.rsplit(".", 1)
        rule = rule_of(self.plan, module)
        if not rule.splits_output:
            if rule.kind == "replicate" or side == "B":
                return None
            return Cut(1, (self._columns(rule.kind, self.shapes[name][1], tp_rank),))
        if side == "A":
            return None
        whole = self.cut(f"{module}.weight", tp_rank)
        assert whole is not None
        parts = self.part_rows[module]
        starts = {p: sum(n for _, n in parts[:k]) for k, (p, _) in enumerate(parts)}
        wanted = [p for p, _ in self.part_rows[f"{module}.lora.{part}"]]
        sizes = dict(parts)
        ranges, offset = [], 0
        for p in wanted:
            lo, hi = starts[p], starts[p] + sizes[p]
            inside = [(max(a, lo), min(b, hi)) for a, b in whole.ranges if a < hi and b > lo]
            ranges += [(offset + a - lo, offset + b - lo) for a, b in inside]
            offset += sizes[p]
        return Cut(0, tuple(ranges) or ((0, 0),))

    def whole_on_every_tp_rank(self, name: str) -> bool:
        return self.cut(name, 0) is None

    # --- fsdp: rows of what tensor parallelism leaves ---

    @property
    def fsdp_ranks(self) -> int:
        """cp ranks hold the same weights, so where fsdp shards at all it shards over both."""
        return self.layout.fsdp * self.layout.cp if self.layout.fsdp > 1 else 1

    def fsdp_rank(self, rank: int) -> int:
        at = self.layout.coords(rank)
        return at["fsdp"] * self.layout.cp + at["cp"] if self.layout.fsdp > 1 else 0

    def tp_shape(self, name: str, tp_rank: int) -> Shape:
        shape, cut = list(self.shapes[name]), self.cut(name, tp_rank)
        if cut is not None:
            shape[cut.dim] = cut.length
        return tuple(shape)

    def _rows(self, name: str, rank: int) -> Range:
        """torch.chunk's rule, which fully_shard uses: chunks of ceil(rows / ranks), the last ones short or empty."""
        rows = self.tp_shape(name, self.layout.coords(rank)["tp"])[0]
        size = -(-rows // self.fsdp_ranks)
        start = min(rows, size * self.fsdp_rank(rank))
        return start, min(rows, start + size)

    # --- all together ---

    def holds(self, name: str, rank: int) -> bool:
        return self.layout.coords(rank)["pp"] in self.pp_ranks_of(name)

    def local_shape(self, name: str, rank: int) -> Shape:
        start, stop = self._rows(name, rank)
        return (stop - start, *self.tp_shape(name, self.layout.coords(rank)["tp"])[1:])

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        if not self.holds(name, rank):
            return ()
        shape = self.shapes[name]
        cut = self.cut(name, self.layout.coords(rank)["tp"]) or Cut(0, ((0, shape[0]),))
        first, last = self._rows(name, rank)
        out, at = [], 0
        for start, stop in cut.ranges:
            if cut.dim == 0:
                a, b = max(at, first), min(at + stop - start, last)
                if a < b:
                    here = slice(start + a - at, start + b - at)
                    out.append(_box(shape, {0: here}, {0: slice(a - first, b - first)}))
            elif stop > start and last > first:
                there, here = slice(first, last), slice(0, last - first)
                columns = slice(start, stop), slice(at, at + stop - start)
                out.append(_box(shape, {0: there, 1: columns[0]}, {0: here, 1: columns[1]}))
            at += stop - start
        return tuple(out)

    def holders(self, name: str) -> list[tuple[int, tuple[Box, ...]]]:
        """Ranks that together have every element exactly once."""
        pp = self.pp_ranks_of(name)[0]
        tps = range(1) if self.whole_on_every_tp_rank(name) else range(self.layout.tp)
        shards = [(f, c) for f in range(self.layout.fsdp) for c in range(self.layout.cp)]
        if self.layout.fsdp == 1:
            shards = [(0, 0)]
        out: list[tuple[int, tuple[Box, ...]]] = []
        for tp in tps:
            # A kv head that several ranks repeat is taken from the first of them.
            taken = [r for before in range(tp) for r in self.rows_cut(name, before)]
            for fsdp, cp in shards:
                rank = self.layout.rank(pp=pp, fsdp=fsdp, cp=cp, tp=tp)
                kept = tuple(b for box in self.boxes(name, rank) for b in _without(box, taken))
                if kept:
                    out.append((rank, kept))
        return out

    def rows_cut(self, name: str, tp_rank: int) -> Iterable[Range]:
        cut = self.cut(name, tp_rank)
        return cut.ranges if cut is not None and cut.dim == 0 else ()

    def owned(self, name: str, tp_rank: int) -> list[Range]:
        """Local rows (after tensor parallelism) that no earlier tensor-parallel rank has as well: for norms."""
        cut = self.cut(name, tp_rank)
        if cut is None:
            return [(0, self.shapes[name][0])] if tp_rank == 0 else []
        if cut.dim != 0:
            return [(0, self.shapes[name][0])]
        taken = [r for before in range(tp_rank) for r in self.rows_cut(name, before)]
        out, at = [], 0
        for start, stop in cut.ranges:
            for a, b in _minus((start, stop), taken):
                out.append((at + a - start, at + b - start))
            at += stop - start
        return out


def _box(shape: Shape, there: dict[int, slice], here: dict[int, slice]) -> Box:
    whole = [slice(0, n) for n in shape]
    return Box(tuple(there.get(d, s) for d, s in enumerate(whole)), tuple(here.get(d, s) for d, s in enumerate(whole)))


def _minus(wanted: Range, taken: Iterable[Range]) -> list[Range]:
    left = [wanted]
    for lo, hi in taken:
        left = [piece for a, b in left for piece in ((a, min(b, lo)), (max(a, hi), b)) if piece[0] < piece[1]]
    return left


def _without(box: Box, taken: Iterable[Range]) -> list[Box]:
    rows, here = box.global_slices[0], box.local_slices[0]
    out = []
    for a, b in _minus((rows.start, rows.stop), taken):
        local = slice(here.start + a - rows.start, here.start + b - rows.start)
        out.append(Box((slice(a, b), *box.global_slices[1:]), (local, *box.local_slices[1:])))
    return out
