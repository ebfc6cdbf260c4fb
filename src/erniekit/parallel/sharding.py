"""Sharding: which part of every tensor each rank holds, as pure data. The one source for training, loading and saving.

Computed from the model's plan and the layout; without communication. See plan.py for the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from erniekit.parallel.layout import Layout
from erniekit.parallel.plan import HeadShare, Plan, Range, Rule, head_share, rule_of, share

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The same block, seen in the whole tensor and in a rank's local one."""

    global_slices: tuple[slice, ...]
    local_slices: tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """A rank holds these ranges of the whole tensor's rows, end to end in this order; of them these columns."""

    rows: tuple[Range, ...]
    columns: Range | None = None  # None: all

    def shape_of(self, whole: Shape) -> Shape:
        rows = sum(stop - start for start, stop in self.rows)
        return (rows, *whole[1:]) if self.columns is None else (rows, self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Heads:
    """What the plan needs of the attention: counts only."""

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
        front: tuple[str, ...] = (),
    ) -> None:
        """shapes: every parameter of the whole model by our names (adapters too). part_rows: for each fused linear the
        public parts and their rows, and for each `<linear>.lora.<key>` those its B covers. front: how names of weights
        in front of the layers begin, which are on the first stage with the embedding."""
        self.shapes, self.plan, self.heads, self.layout = dict(shapes), plan, heads, layout
        self.num_layers, self.tied, self.part_rows, self.front = num_layers, tied, part_rows, front
        self._rules = {name: rule_of(plan, module_of(name)) for name in self.shapes}
        self.mtp_trained = False  # layers that predict further tokens embed them, on the last stage
        self.packed: set[str] = set()  # frozen weights that are not plain: cut by their bytes, not by their rows

    def names(self) -> list[str]:
        return list(self.shapes)

    @property
    def embeds_last(self) -> bool:
        """Whether the last stage has the embedding too."""
        return self.tied or self.mtp_trained

    def shape(self, name: str) -> Shape:
        return self.shapes[name]

    # --- pipeline: which stage has a layer ---

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
            return (0, last) if self.embeds_last and last else (0,)
        return (0,) if name.startswith(self.front) else (last,)

    def pp_ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(s % self.layout.pp for s in self.stages_of(name)))

    # --- tensor parallel: which rows or columns ---

    def head_share(self, tp_rank: int) -> HeadShare:
        return head_share(self.heads.num_heads, self.heads.num_kv_heads, self.layout.tp, tp_rank)

    def cut(self, name: str, tp_rank: int, place: int = 0) -> Cut | None:
        """What a rank at this tensor-parallel rank and this place among the experts' ranks holds; None: all of it."""
        rule, shape = self._rules[name], self.shapes[name]
        if rule.is_experts:
            return self._expert_cut(name, tp_rank, tp_rank if self.layout.experts_over == "tp" else place)
        if self.layout.tp == 1:
            return None
        if ".lora." in name:
            return self._adapter_cut(name, tp_rank)
        if rule.kind == "heads":
            return Cut(self._head_rows(tp_rank))
        if rule.kind in ("column", "vocab"):
            width = shape[0] // rule.parts
            start, stop = share(width, self.layout.tp, tp_rank)
            return Cut(tuple((p * width + start, p * width + stop) for p in range(rule.parts)))
        if rule.is_whole or name.endswith(".bias"):
            return None
        return Cut(((0, shape[0]),), self._columns(rule.kind, shape[1], tp_rank))

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
        """`<linear>.lora.<part | shared>.<A | B>`: B follows its linear's rows, A its columns; the other is whole.
        A0 and B0, what those began as, are cut as they are."""
        module, _, rest = name.partition(".lora.")
        part, matrix = rest.rsplit(".", 1)
        side = matrix[0]
        rule, shape = self._rules[name], self.shapes[name]
        if not rule.splits_output:
            if rule.is_whole or side == "B":
                return None
            return Cut(((0, shape[0]),), self._columns(rule.kind, shape[1], tp_rank))
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
            inside = [(max(a, lo), min(b, hi)) for a, b in whole.rows if a < hi and b > lo]
            ranges += [(offset + a - lo, offset + b - lo) for a, b in inside]
            offset += sizes[p]
        return Cut(tuple(ranges) or ((0, 0),))

    # --- experts: whole ones to each rank, or a tensor-parallel cut inside every one ---

    def rule(self, name: str) -> Rule:
        return self._rules[name]

    def is_expert(self, name: str) -> bool:
        return self._rules[name].is_experts

    def expert_count(self, name: str) -> int:
        module = module_of(name)
        return self.shapes[f"{module}.weight"][0] // sum(rows for _, rows in self.part_rows[module])

    def expert_share(self, name: str, place: int) -> Range:
        return share(self.expert_count(name), self.layout.expert_ranks, place)

    def experts_held(self, name: str, rank: int) -> Range:
        """Which experts' rows a rank has of a weight, whole or cut inside; any other weight is one expert's."""
        if not self.is_expert(name):
            return 0, 1
        by_tp = self.layout.experts_over == "tp"
        return self.expert_share(name, self.layout.coords(rank)["tp"] if by_tp else self.layout.expert_place(rank)[0])

    @property
    def cuts_inside_experts(self) -> bool:
        return self.layout.tp > 1 and self.layout.experts_over in ("none", "data")

    def _expert_cut(self, name: str, tp_rank: int, place: int) -> Cut | None:
        first, last = self.expert_share(name, place)
        shape, side = self.shapes[name], name.rpartition(".")[2]
        each = shape[0] // self.expert_count(name)
        rows = ((first * each, last * each),)
        whole = None if self.layout.experts_over == "none" else Cut(rows)
        if not self._cut_by_tp(name) or not self.cuts_inside_experts:
            return whole
        if self._rules[name].kind == "experts_in":
            return Cut(rows, share(shape[1], self.layout.tp, tp_rank))
        parts = self.part_rows[name.removesuffix(f".{side}")]
        inside, start = [], 0
        for _, width in parts:
            a, b = share(width, self.layout.tp, tp_rank)
            inside.append((start + a, start + b))
            start += width
        return Cut(tuple((e * each + a, e * each + b) for e in range(first, last) for a, b in inside))

    def _cut_by_tp(self, name: str) -> bool:
        if not self.is_expert(name):
            return self.cut(name, 0) is not None
        if not self.cuts_inside_experts:
            return self.layout.experts_over == "tp"
        # Of an adapter the side that meets the uncut dim stays whole.
        return not name.endswith(".A" if self._rules[name].kind == "experts" else ".B")

    def whole_on_every_tp_rank(self, name: str) -> bool:
        return not self._cut_by_tp(name)

    # --- fsdp: rows of what tensor parallelism leaves ---

    def _shards(self, name: str) -> int:
        return 1 if name in self.packed else self._ranks(name)

    def _ranks(self, name: str) -> int:
        """cp ranks hold the same weights, so where fsdp shards at all it shards over both; experts that are spread over
        data ranks are sharded over the ranks with the same ones."""
        layout = self.layout
        if layout.fsdp == 1:
            return 1
        return layout.expert_copies if self._spread_over_data(name) else layout.fsdp * layout.cp

    def _place(self, name: str, rank: int) -> int:
        """Which of those ranks it is."""
        layout, at = self.layout, self.layout.coords(rank)
        return layout.expert_place(rank)[1] if self._spread_over_data(name) else at["fsdp"] * layout.cp + at["cp"]

    def packed_ranks(self, name: str) -> int:
        """Over how many ranks the bytes of a packed weight are cut. Stages 1 and 2 share out what is trained."""
        return self._ranks(name) if self.layout.sharding_stage == 3 else 1

    def packed_piece(self, name: str, rank: int, count: int) -> Range:
        """Which of `count` numbers a rank keeps, of those that packed weights such as this one lie in."""
        return _chunk(count, self.packed_ranks(name), self._place(name, rank))

    def _spread_over_data(self, name: str) -> bool:
        return self.layout.experts_over_data and self.is_expert(name)

    def tp_shape(self, name: str, tp_rank: int, place: int = 0) -> Shape:
        """Before fsdp."""
        cut = self.cut(name, tp_rank, place)
        return self.shapes[name] if cut is None else cut.shape_of(self.shapes[name])

    def _cut_of(self, name: str, rank: int) -> Cut:
        place = self.layout.expert_place(rank)[0] if self._spread_over_data(name) else 0
        return self.cut(name, self.layout.coords(rank)["tp"], place) or Cut(((0, self.shapes[name][0]),))

    def _rows(self, name: str, rank: int, rows: int) -> Range:
        shards = self._shards(name)
        return _chunk(rows, shards, self._place(name, rank)) if shards > 1 else (0, rows)

    # --- all together ---

    def matrix_shapes(self, name: str) -> set[tuple[int, int]]:
        """Rows and columns of a linear's weight on any rank, before fsdp; of experts those of one expert."""
        found = set()
        for place in range(self.layout.expert_ranks if self.is_expert(name) else 1):
            first, last = self.expert_share(name, place) if self.is_expert(name) else (0, 1)
            for tp in range(self.layout.tp if last > first else 0):
                rows, width = self.tp_shape(name, tp, place)
                found.add((rows // (last - first), width))
        return found

    def cuts_columns(self, name: str, rank: int) -> bool:
        """Whether several ranks have the same rows of it, each with columns of its own."""
        return self._cut_of(name, rank).columns is not None

    def holds(self, name: str, rank: int) -> bool:
        return self.layout.coords(rank)["pp"] in self.pp_ranks_of(name)

    def local_shape(self, name: str, rank: int) -> Shape:
        return self.rank_shapes(name, rank)[1]

    def rank_shapes(self, name: str, rank: int) -> tuple[Shape, Shape]:
        """What a rank has of a tensor (before fsdp, after it)."""
        shape = self._cut_of(name, rank).shape_of(self.shapes[name])
        start, stop = self._rows(name, rank, shape[0])
        return shape, (stop - start, *shape[1:])

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        if not self.holds(name, rank):
            return ()
        shape, cut = self.shapes[name], self._cut_of(name, rank)
        first, last = self._rows(name, rank, cut.shape_of(shape)[0])
        there, here = {}, {}
        if cut.columns is not None:
            start, stop = cut.columns
            if start == stop:
                return ()
            there[1], here[1] = slice(start, stop), slice(0, stop - start)
        out, at = [], 0
        for start, stop in cut.rows:
            a, b = max(at, first), min(at + stop - start, last)
            if a < b:
                rows = slice(start + a - at, start + b - at), slice(a - first, b - first)
                out.append(_box(shape, {0: rows[0], **there}, {0: rows[1], **here}))
            at += stop - start
        return tuple(out)

    def holders(self, name: str) -> list[tuple[int, tuple[Box, ...]]]:
        """Ranks that together have every element exactly once."""
        out: list[tuple[int, tuple[Box, ...]]] = []
        for tp in range(self.layout.tp if self._cut_by_tp(name) else 1):
            # A kv head that several ranks repeat is taken from the first of them.
            taken = [] if self.is_expert(name) else [r for t in range(tp) for r in self.rows_cut(name, t)]
            for rank in self._first_holders(name, tp):
                kept = tuple(b for box in self.boxes(name, rank) for b in _without(box, taken))
                if kept:
                    out.append((rank, kept))
        return out

    def _first_holders(self, name: str, tp: int) -> list[int]:
        layout, pp = self.layout, self.pp_ranks_of(name)[0]
        if self._spread_over_data(name):
            at = dict(pp=pp) if layout.experts_over == "world" else dict(pp=pp, tp=tp)
            places = [(p, c) for p in range(layout.expert_ranks) for c in range(self._shards(name))]
            return [layout.expert_rank(place, copy, **at) for place, copy in places]
        shards = [divmod(shard, layout.cp) for shard in range(self._shards(name))]
        return [layout.rank(pp=pp, fsdp=fsdp, cp=cp, tp=tp) for fsdp, cp in shards]

    def twin(self, name: str, rank: int) -> int:
        """The first rank that holds just what this one holds."""
        layout, at = self.layout, self.layout.coords(rank)
        if not self._spread_over_data(name):
            return layout.rank(**{**at, "dp": 0, "cp": at["cp"] if layout.fsdp > 1 else 0})
        place, copy = layout.expert_place(rank)
        others = {} if layout.experts_over == "world" else dict(tp=at["tp"])
        return layout.expert_rank(place, copy if layout.fsdp > 1 else 0, pp=at["pp"], **others)

    def rows_cut(self, name: str, tp_rank: int) -> Iterable[Range]:
        cut = self.cut(name, tp_rank)
        return cut.rows if cut is not None and cut.columns is None else ()


def _chunk(count: int, ranks: int, place: int) -> Range:
    """torch.chunk's rule, which fully_shard uses: chunks of ceil(count / ranks), the last ones short or empty."""
    size = -(-count // ranks)
    start = min(count, size * place)
    return start, min(count, start + size)


def module_of(name: str) -> str:
    """The linear a weight or an adapter belongs to; a parameter outside any is its own."""
    return name.partition(".lora.")[0] if ".lora." in name else name.rpartition(".")[0] or name


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
