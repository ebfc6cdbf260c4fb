"""Bytes of weights, gradients and optimiser states that a rank holds, from the sharding table the trainer works from.

`of_tensor` is exact. `TensorBlocks` does the same for a search: of like layers one is counted, and of like ranks the
first, which has the largest share of everything. Called by evaluate.py; tests count real ranks against it.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from typing import NamedTuple

from erniekit.kernels.moments8 import BLOCK, fits8
from erniekit.models.costs import MASTER_BYTES, MOMENT_BYTES
from erniekit.parallel.layout import Layout
from erniekit.parallel.sharding import Sharding

SMALLEST = 16  # columns of a block of 8-bit moments
# Tensors whose states are on the device at once, of an optimiser in host memory: those that come or leave, and the one
# that is updated (optim/offload.py). They follow each other, so that those of one layer are the most.
STAGED = 5


@dataclass(frozen=True)
class StorageKinds:
    """How a run stores its tensors, by the keys that decide it. Names are the sharding's."""

    trained: frozenset[str]
    fp32: frozenset[str] = frozenset()  # stay fp32 whatever the run computes in
    bits: Mapping[str, float] = field(default_factory=dict)  # of packed weights; all others are plain
    compute: int = 2  # bytes
    masters: str = "fp32"
    moments: str = "fp32"
    optimiser_away: bool = False  # offload_optim
    shards_away: bool = False  # sharding: offload
    in_backward: bool = False  # updates inside backward
    reference: bool = False  # a second copy of the weights, for DPO
    one_moment: frozenset[str] = frozenset()  # trained with an average only, fp32 (Muon)
    fused: bool = True  # an update that takes gradients in 16 bit


class TensorBytes(
    NamedTuple
):  # a tuple, as a search makes tens of thousands and a frozen dataclass takes five times as long
    """Of one rank and a set of tensors, in bytes."""

    weights: float = 0.0
    master: float = 0.0  # besides the weight
    moments: float = 0.0
    gradients: float = 0.0  # as kept until the update
    formed: float = 0.0  # as backward forms them, before they are shared out
    gathered: float = 0.0  # of all ranks' shards together, as computed with
    trained: float = 0.0  # numbers, not bytes
    reduced: float = 0.0  # trained numbers before sharding
    largest: float = 0.0  # packed weight, unpacked
    widest: tuple[float, ...] = ()  # states of the tensors that have the most, STAGED of them

    def plus(self, other: TensorBytes) -> TensorBytes:
        a, b, c, d, e, f, g, h, largest, widest = self
        A, B, C, D, E, F, G, H, other_largest, other_widest = other
        return TensorBytes(
            a + A, b + B, c + C, d + D, e + E, f + F, g + G, h + H,
            largest if largest >= other_largest else other_largest, _most(widest + other_widest),
        )  # fmt: skip

    def times(self, count: int) -> TensorBytes:
        if count == 1:
            return self
        if not count:
            return NOTHING
        a, b, c, d, e, f, g, h, largest, widest = self
        return TensorBytes(
            count * a, count * b, count * c, count * d, count * e, count * f, count * g, count * h, largest, widest
        )  # fmt: skip


NOTHING = TensorBytes()


def _most(sizes: tuple[float, ...]) -> tuple[float, ...]:
    return sizes if len(sizes) < 2 else tuple(sorted(sizes, reverse=True)[:STAGED])


def of_tensor(sharding: Sharding, name: str, rank: int, storing: StorageKinds, micro_batches: int = 1) -> TensorBytes:
    layout = sharding.layout
    whole, local = sharding.rank_shapes(name, rank)
    before, count = prod(whole), prod(local)
    sharded = layout.fsdp > 1 and name not in sharding.packed
    if name in storing.bits:
        rows, ranks = local[0] if local else 0, sharding.packed_ranks(name)
        size = count * storing.bits[name] / 8 + 4 * rows
        return TensorBytes(weights=size / ranks, gathered=size if ranks > 1 else 0.0, largest=2.0 * count)
    trained, four = name in storing.trained, storing.compute == 4 or name in storing.fp32
    wide = four or (sharded and trained)
    weights = count * (4 if wide else storing.compute) * (2 if storing.reference and trained else 1)
    gathered = before * (4 if name in storing.fp32 else storing.compute) if sharded else 0
    if not trained:
        return TensorBytes(weights=weights, gathered=gathered)
    master = 0.0 if wide else count * _master(storing, local)
    moments = _moments(sharding, name, local, storing) + 4
    return TensorBytes(
        weights=weights,
        master=master,
        moments=moments,
        gradients=count * _gradient(layout, storing, wide, micro_batches),
        formed=before * (4 if wide and not sharded else storing.compute),
        gathered=gathered,
        trained=count,
        reduced=before,
        widest=(master + moments,),
    )


def _master(storing: StorageKinds, shape: tuple[int, ...]) -> float:
    kind = "exact16" if storing.masters == "none" and len(shape) != 2 else storing.masters
    return MASTER_BYTES[kind]


def _moments(sharding: Sharding, name: str, local: tuple[int, ...], storing: StorageKinds) -> float:
    count = prod(local)
    if name in storing.one_moment:
        return 4.0 * count
    block = _block(sharding, name) if storing.moments == "8bit" else 0
    if storing.moments == "8bit" and block:
        return 2.0 * count + 3 * 4 * local[0] * -(-local[1] // block)
    return count * (MOMENT_BYTES["fp32"] if storing.moments == "8bit" else MOMENT_BYTES[storing.moments])


def _block(sharding: Sharding, name: str) -> int:
    """Columns that share a scale: fewer where tensor parallelism cuts inside a block, none where few would be left."""
    if not fits8(sharding.shape(name)):
        return 0
    cuts = (sharding.cut(name, tp) for tp in range(sharding.layout.tp))
    block = gcd(BLOCK, *(cut.columns[0] for cut in cuts if cut is not None and cut.columns is not None))
    return block if block >= SMALLEST else 0


def _gradient(layout: Layout, storing: StorageKinds, wide: bool, micro_batches: int) -> float:
    """Bytes of a kept gradient: in 16 bit only where one micro-batch on one rank is all there is."""
    several = micro_batches > 1 or layout.size > 1
    return 4.0 if wide or several or not storing.fused else float(storing.compute)


def _standard(kind: bool, sparse: tuple[bool, ...], trained: frozenset[str]) -> int:
    """The layer that stands for all of its kind: where some are frozen, the first of those that train the most."""
    counts = [0] * len(sparse)
    for name in trained:
        if name.startswith("layers."):
            counts[int(name.split(".")[1])] += 1
    return max((n for n, held in enumerate(sparse) if held == kind), key=lambda n: (counts[n], -n))


class CutKey(NamedTuple):
    """Equal for layouts that cut and store tensors alike."""

    tp: int
    shards: int  # that fsdp cuts a tensor into; 1: none
    over: str  # Layout.experts_over
    expert_ranks: int
    expert_shards: int  # of an expert that is spread over data ranks
    in_pieces: bool  # stage 3 of packed weights
    several: bool  # gradients of several micro-batches or ranks are added

    @property
    def of_others(self) -> tuple[object, ...]:
        """What matters to tensors that are no expert's, and are not packed."""
        return self.tp, self.shards, self.several

    @property
    def of_experts(self) -> tuple[object, ...]:
        over = self.over
        shards: int = self.shards if over in ("none", "tp") else self.shards > 1
        return 0 if over == "world" else self.tp, shards, over, self.expert_ranks, self.expert_shards, self.several


class TensorBlocks:
    """The tensors of a model by block: one dense layer, one with experts, and what is around them."""

    def __init__(self, sharding: Sharding, sparse: tuple[bool, ...], storing: StorageKinds) -> None:
        self.sharding, self.sparse, self.storing = sharding, sparse, storing
        first = {kind: _standard(kind, sparse, storing.trained) for kind in dict.fromkeys(sparse)}
        self.names: dict[str, list[str]] = {"embed": [], "front": [], "last": [], "dense": [], "sparse": []}
        for name in sharding.names():
            if name.startswith("layers."):
                number = int(name.split(".")[1])
                if first[sparse[number]] == number:
                    self.names["sparse" if sparse[number] else "dense"].append(name)
            elif name.startswith("embed."):
                self.names["embed"].append(name)
            else:
                self.names["front" if name.startswith(sharding.front) else "last"].append(name)
        kinds: dict[tuple[object, ...], int] = {}  # like tensors have one number, as a search looks it up often
        named = [name for names in self.names.values() for name in names]
        self._like = {name: kinds.setdefault(self._signature(name), len(kinds)) for name in named}
        self._alike = {block: self._counted_alike(names) for block, names in self.names.items()}
        self._experts = {block: any(map(sharding.is_expert, names)) for block, names in self.names.items()}
        self._packed = {*sharding.packed, *storing.bits}
        self._last: tuple[Layout | None, int, CutKey] = (None, 0, CutKey(1, 1, "none", 1, 1, False, False))
        self._known: dict[CutKey, dict[str, TensorBytes]] = {}
        self._blocks: dict[tuple[object, ...], TensorBytes] = {}  # that have no experts
        self._tensors: dict[tuple[object, ...], TensorBytes] = {}
        self._stages: dict[tuple[object, ...], TensorBytes] = {}

    @property
    def counted(self) -> int:
        """How many tensors were counted: a search has more layouts than ways to cut one."""
        return len(self._tensors)

    def _counted_alike(self, names: list[str]) -> list[tuple[str, int]]:
        """One of each kind of like tensors, and how many there are."""
        first: dict[int, str] = {}
        for name in names:
            first.setdefault(self._like[name], name)
        counts = Counter(self._like[name] for name in names)
        return [(name, counts[like]) for like, name in first.items()]

    def _signature(self, name: str) -> tuple[object, ...]:
        """Equal for tensors that are cut and stored alike: those of the layers of a vision tower."""
        stored = self.storing
        sets = (stored.trained, stored.fp32, stored.one_moment, self.sharding.packed)
        plain = re.sub(r"\d+", "", name)
        rule, shape = self.sharding.rule(name), self.sharding.shape(name)
        return (plain, rule, shape, stored.bits.get(name), *(name in held for held in sets))

    def cut(self, layout: Layout, micro_batches: int) -> CutKey:
        if layout is self._last[0] and micro_batches == self._last[1]:  # asked for several times of each layout
            return self._last[2]
        ranks, over, shards = layout.expert_ranks, layout.experts_over, 1
        if layout.fsdp > 1:
            shards = layout.fsdp * layout.cp
        spread = shards > 1 and over in ("data", "world")
        found = CutKey(
            layout.tp, shards, over, ranks, layout.expert_pool // ranks if spread else 1,
            bool(self._packed) and shards > 1 and layout.sharding_stage == 3, micro_batches > 1 or layout.size > 1,
        )  # fmt: skip
        self._last = (layout, micro_batches, found)
        return found

    def shares(self, layout: Layout, micro_batches: int) -> dict[str, TensorBytes]:
        """Of the first rank, by block."""
        key = self.cut(layout, micro_batches)
        if key not in self._known:
            table = copy.copy(self.sharding)
            table.layout = layout
            self._known[key] = {block: self._block(table, block, key, micro_batches) for block in self.names}
        return self._known[key]

    def _block(self, table: Sharding, block: str, cut: CutKey, micro_batches: int) -> TensorBytes:
        experts, others = cut.of_experts, cut.of_others
        whole = (block, others, cut.in_pieces)
        if not self._experts[block] and whole in self._blocks:
            return self._blocks[whole]
        found = NOTHING
        for name, count in self._alike[block]:
            pieces = cut.in_pieces and name in self._packed
            key = (self._like[name], count, experts if table.is_expert(name) else others, pieces)
            if key not in self._tensors:
                one = of_tensor(table, name, 0, self.storing, micro_batches)
                self._tensors[key] = one.times(count)._replace(widest=one.widest * min(count, STAGED))
            found = found.plus(self._tensors[key])
        if not self._experts[block]:
            self._blocks[whole] = found
        return found

    def stage(self, layout: Layout, numbers: Iterable[int], first: bool, last: bool, micro_batches: int) -> TensorBytes:
        """Of a rank with these layers."""
        held = [self.sparse[n] for n in numbers]
        sparse = held.count(True)
        key = (self.cut(layout, micro_batches), len(held) - sparse, sparse, first, last)
        if key not in self._stages:
            each = self.shares(layout, micro_batches)
            found = each["dense"].times(len(held) - sparse).plus(each["sparse"].times(sparse))
            if first:
                found = found.plus(each["embed"]).plus(each["front"])
            if last:
                found = found.plus(each["last"])
                if self.sharding.embeds_last and not first:
                    found = found.plus(each["embed"])
            self._stages[key] = found
        return self._stages[key]

    def staged(self, layout: Layout, numbers: Iterable[int], first: bool, last: bool, micro_batches: int) -> float:
        """Bytes of states in host memory that are on a rank's device at once while it updates these layers."""
        each = self.shares(layout, micro_batches)
        kinds = {"sparse" if self.sparse[n] else "dense" for n in numbers}
        blocks = kinds | ({"embed", "front"} if first else set()) | ({"last"} if last else set())
        return max((sum(each[block].widest) for block in blocks), default=0.0)

    def largest_layer(self, layout: Layout, numbers: Iterable[int], micro_batches: int) -> TensorBytes:
        each = self.shares(layout, micro_batches)
        kinds = {self.sparse[n] for n in numbers}
        found = [each["sparse" if sparse else "dense"] for sparse in kinds]
        return max(found, key=lambda share: share.formed + share.gathered + share.largest, default=NOTHING)
