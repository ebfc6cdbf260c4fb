"""Bytes of weights, gradients and optimiser states that a rank holds, from the sharding table the trainer works from.

`of_rank` is exact, tensor by tensor. `Blocks` does the same for a search: of like layers one is counted, and of like
ranks the first, which has the largest share of everything. Called by search.py; tests count real ranks against it.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, prod

from erniekit.kernels.moments8 import BLOCK, fits8
from erniekit.models.costs import MASTER_BYTES, MOMENT_BYTES
from erniekit.parallel.mesh import Layout
from erniekit.parallel.sharding import FRONT, Sharding

SMALLEST = 16  # columns of a block of 8-bit moments
# Tensors whose states are on the device at once, of an optimiser in host memory: those that come or leave, and the one
# that is updated (optim/offload.py). They follow each other, so that those of one layer are the most.
STAGED = 5


@dataclass(frozen=True)
class Storing:
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


@dataclass(frozen=True)
class Share:
    """Of one rank and a set of tensors, in bytes."""

    weights: float = 0.0
    master: float = 0.0  # besides the weight
    moments: float = 0.0
    gradients: float = 0.0  # as kept until the update
    formed: float = 0.0  # as backward forms them, before they are shared out
    gathered: float = 0.0  # of all ranks' shards together, as computed with
    largest: float = 0.0  # packed weight, unpacked
    trained: float = 0.0  # numbers, not bytes
    reduced: float = 0.0  # trained numbers before sharding
    widest: tuple[float, ...] = ()  # states of the tensors that have the most, STAGED of them

    def __add__(self, other: Share) -> Share:
        return Share(
            self.weights + other.weights, self.master + other.master, self.moments + other.moments,
            self.gradients + other.gradients, self.formed + other.formed, self.gathered + other.gathered,
            max(self.largest, other.largest), self.trained + other.trained, self.reduced + other.reduced,
            _most(self.widest + other.widest),
        )  # fmt: skip

    def times(self, count: float) -> Share:
        return Share(
            count * self.weights, count * self.master, count * self.moments, count * self.gradients,
            count * self.formed, count * self.gathered, self.largest if count else 0.0, count * self.trained,
            count * self.reduced, self.widest if count else (),
        )  # fmt: skip


def _most(sizes: tuple[float, ...]) -> tuple[float, ...]:
    return sizes if len(sizes) < 2 else tuple(sorted(sizes, reverse=True)[:STAGED])


def of_tensor(sharding: Sharding, name: str, rank: int, storing: Storing, micro_batches: int = 1) -> Share:
    layout = sharding.layout
    local = sharding.local_shape(name, rank)
    count = prod(local)
    place = layout.expert_place(rank)[0] if layout.experts_over_data and sharding.is_expert(name) else 0
    before = prod(sharding.tp_shape(name, layout.coords(rank)["tp"], place))
    sharded = layout.fsdp > 1 and name not in sharding.packed
    if name in storing.bits:
        rows, ranks = local[0] if local else 0, sharding.packed_ranks(name)
        whole = count * storing.bits[name] / 8 + 4 * rows
        return Share(weights=whole / ranks, gathered=whole if ranks > 1 else 0.0, largest=2.0 * count)
    trained, four = name in storing.trained, storing.compute == 4 or name in storing.fp32
    wide = four or (sharded and trained)
    weights = count * (4 if wide else storing.compute) * (2 if storing.reference and trained else 1)
    gathered = before * (4 if name in storing.fp32 else storing.compute) if sharded else 0
    if not trained:
        return Share(weights=weights, gathered=gathered)
    master = 0.0 if wide else count * _master(storing, local)
    moments = _moments(sharding, name, local, storing) + 4
    return Share(
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


def _master(storing: Storing, shape: tuple[int, ...]) -> float:
    kind = "exact16" if storing.masters == "none" and len(shape) != 2 else storing.masters
    return MASTER_BYTES[kind]


def _moments(sharding: Sharding, name: str, local: tuple[int, ...], storing: Storing) -> float:
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


def _gradient(layout: Layout, storing: Storing, wide: bool, micro_batches: int) -> float:
    """Bytes of a kept gradient: in 16 bit only where one micro-batch on one rank is all there is."""
    several = micro_batches > 1 or layout.size > 1
    return 4.0 if wide or several or not storing.fused else float(storing.compute)


def of_rank(sharding: Sharding, rank: int, storing: Storing, micro_batches: int = 1) -> Share:
    held = (name for name in sharding.names() if sharding.holds(name, rank))
    return total(of_tensor(sharding, name, rank, storing, micro_batches) for name in held)


def total(shares: Iterable[Share]) -> Share:
    found = Share()
    for share in shares:
        found = found + share
    return found


def _standard(kind: bool, sparse: tuple[bool, ...], trained: frozenset[str]) -> int:
    """The layer that stands for all of its kind: where some are frozen, the first of those that train the most."""
    counts = [0] * len(sparse)
    for name in trained:
        if name.startswith("layers."):
            counts[int(name.split(".")[1])] += 1
    return max((n for n, held in enumerate(sparse) if held == kind), key=lambda n: (counts[n], -n))


def _but_experts(cut: tuple[object, ...]) -> tuple[object, ...]:
    """Of `Blocks.cut`: what matters to tensors that are no expert's."""
    tp, shards, _, _, _, *rest = cut
    return tp, shards, *rest


class Blocks:
    """The tensors of a model by block: one dense layer, one with experts, and what is around them."""

    def __init__(self, sharding: Sharding, sparse: tuple[bool, ...], storing: Storing) -> None:
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
                self.names["front" if name.startswith(FRONT) else "last"].append(name)
        self._like = {name: self._signature(name) for names in self.names.values() for name in names}
        self._alike = {block: self._counted_alike(names) for block, names in self.names.items()}
        self._experts = {block: any(map(sharding.is_expert, names)) for block, names in self.names.items()}
        self._known: dict[tuple[object, ...], dict[str, Share]] = {}
        self._blocks: dict[tuple[object, ...], Share] = {}
        self._tensors: dict[tuple[object, ...], Share] = {}
        self._stages: dict[tuple[object, ...], Share] = {}

    @property
    def counted(self) -> int:
        """How many tensors were counted: a search has more layouts than ways to cut one."""
        return len(self._tensors)

    def _counted_alike(self, names: list[str]) -> list[tuple[str, int]]:
        """One of each kind of like tensors, and how many there are."""
        first: dict[tuple[object, ...], str] = {}
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

    @staticmethod
    def cut(layout: Layout, micro_batches: int) -> tuple[object, ...]:
        """Equal for layouts that cut tensors alike."""
        ranks = layout.expert_ranks
        over = layout.experts if ranks > 1 else "none"
        return (
            layout.tp, layout.fsdp * layout.cp if layout.fsdp > 1 else 1, over, ranks, layout.expert_pool // ranks,
            layout.sharding_stage == 3, layout.size > 1, micro_batches > 1,
        )  # fmt: skip

    def shares(self, layout: Layout, micro_batches: int) -> dict[str, Share]:
        """Of the first rank, by block."""
        key = self.cut(layout, micro_batches)
        if key not in self._known:
            table = copy.copy(self.sharding)
            table.layout = layout
            self._known[key] = {block: self._block(table, block, key, micro_batches) for block in self.names}
        return self._known[key]

    def _block(self, table: Sharding, block: str, cut: tuple[object, ...], micro_batches: int) -> Share:
        key = (block, *(cut if self._experts[block] else _but_experts(cut)))
        if key not in self._blocks:
            found = Share()
            for name, count in self._alike[block]:
                one = self._tensor(table, name, cut, micro_batches)
                if count > 1:
                    one = replace(one.times(count), widest=one.widest * min(count, STAGED))
                found = found + one
            self._blocks[key] = found
        return self._blocks[key]

    def _tensor(self, table: Sharding, name: str, cut: tuple[object, ...], micro_batches: int) -> Share:
        key = (self._like[name], *(cut if table.is_expert(name) else _but_experts(cut)))
        if key not in self._tensors:
            self._tensors[key] = of_tensor(table, name, 0, self.storing, micro_batches)
        return self._tensors[key]

    def stage(self, layout: Layout, numbers: Iterable[int], first: bool, last: bool, micro_batches: int) -> Share:
        """Of a rank with these layers."""
        held = [self.sparse[n] for n in numbers]
        sparse = held.count(True)
        key = (*self.cut(layout, micro_batches), len(held) - sparse, sparse, first, last)
        if key not in self._stages:
            each = self.shares(layout, micro_batches)
            found = each["dense"].times(len(held) - sparse) + each["sparse"].times(sparse)
            if first:
                found = found + each["embed"] + each["front"]
            if last:
                found = found + each["last"]
                if self.sharding.embeds_last and not first:
                    found = found + each["embed"]
            self._stages[key] = found
        return self._stages[key]

    def staged(self, layout: Layout, numbers: Iterable[int], first: bool, last: bool, micro_batches: int) -> float:
        """Bytes of states in host memory that are on a rank's device at once while it updates these layers."""
        each = self.shares(layout, micro_batches)
        kinds = {"sparse" if self.sparse[n] else "dense" for n in numbers}
        blocks = kinds | ({"embed", "front"} if first else set()) | ({"last"} if last else set())
        return max((sum(each[block].widest) for block in blocks), default=0.0)

    def largest_layer(self, layout: Layout, numbers: Iterable[int], micro_batches: int) -> Share:
        each = self.shares(layout, micro_batches)
        kinds = {self.sparse[n] for n in numbers}
        found = [each["sparse" if sparse else "dense"] for sparse in kinds]
        return max(found, key=lambda share: share.formed + share.gathered + share.largest, default=Share())
