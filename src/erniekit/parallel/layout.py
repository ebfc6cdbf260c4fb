"""Layout: how many ranks each axis has, which rank is where, and which products fit.

Made by world.py, and by planner/search.py of those it compares; everything else is handed one. Order, outermost first:
pp, dp, fsdp, cp, tp, so that tensor-parallel ranks are neighbours (one node) and pipeline stages may be far apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from erniekit.errors import PlanError
from erniekit.printable import counted

AXES = ("pp", "dp", "fsdp", "cp", "tp")
_FIRST = dict.fromkeys(reversed(AXES), 0)
CONFIG_KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp": "data_parallel_degree",
    "fsdp": "sharding_parallel_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
EXPERT_AXES = {"none": (), "tp": ("tp",), "data": ("dp", "fsdp", "cp"), "world": ("dp", "fsdp", "cp", "tp")}


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    sharding_stage: int = 1  # of fsdp: 1 and 2 keep weights gathered between forward and backward, 3 does not
    virtual_stages: int = 1  # pipeline stages a rank holds
    stage_cuts: tuple[int, ...] = ()  # first layer of each stage after the first; empty: even
    experts: str = "none"  # what whole experts are dealt to: none | tp | data | world (data and tp ranks together)
    ep: int = 0  # how many of those ranks hold all experts once; 0: all of them

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different packs."""
        return self.dp * self.fsdp

    @property
    def whole_layers(self) -> bool:
        """Whether a rank computes its layers without other ranks' tensors."""
        return self.tp == self.cp == self.fsdp == 1 and self.experts_over == "none"

    @property
    def length_multiple(self) -> int:
        """What a row's length must divide by: context parallelism cuts it into two pieces a rank, in mirrored order."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def coords(self, rank: int) -> dict[str, int]:
        if rank == 0:  # of which a plan counts tens of thousands of tensors
            return dict(_FIRST)
        out = {}
        for axis in reversed(AXES):
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def rank(self, **coords: int) -> int:
        out = 0
        for axis in AXES:
            out = out * getattr(self, axis) + coords.get(axis, 0)
        return out

    def data_rank(self, rank: int) -> int:
        at = self.coords(rank)
        return at["dp"] * self.fsdp + at["fsdp"]

    # --- experts: dealt to neighbours in a pool of ranks; what is left of the pool holds copies ---

    # Kept once computed: a search of layouts reads them many times.

    @cached_property
    def expert_pool(self) -> int:
        return prod(getattr(self, axis) for axis in EXPERT_AXES[self.experts])

    @cached_property
    def expert_ranks(self) -> int:
        """Ranks that together hold every expert once."""
        return self.tp if self.experts == "tp" else self.ep or self.expert_pool

    @property
    def expert_copies(self) -> int:
        return self.expert_pool // self.expert_ranks

    @cached_property
    def experts_over(self) -> str:
        """`experts`, but none where nothing is dealt out."""
        return self.experts if self.expert_ranks > 1 else "none"

    @property
    def experts_over_data(self) -> bool:
        """Ranks that read different tokens hold different experts."""
        return self.experts_over in ("data", "world")

    def expert_place(self, rank: int) -> tuple[int, int]:
        """(which of the `expert_ranks` a rank is, which copy it belongs to)."""
        at, index = self.coords(rank), 0
        for axis in EXPERT_AXES[self.experts]:
            index = index * getattr(self, axis) + at[axis]
        copy, place = divmod(index, self.expert_ranks)
        return place, copy

    def expert_rank(self, place: int, copy: int, **others: int) -> int:
        """The rank at that place; others: where it is on the axes outside the pool."""
        index, at = copy * self.expert_ranks + place, dict(others)
        for axis in reversed(EXPERT_AXES[self.experts]):
            index, at[axis] = divmod(index, getattr(self, axis))
        return self.rank(**at)

    def describe(self) -> str:
        used = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        extra = ["sequence parallel"] if self.sequence_parallel else []
        extra += [f"sharding stage {self.sharding_stage}"] if self.fsdp > 1 else []
        extra += [f"{self.virtual_stages} stages a rank"] if self.virtual_stages > 1 else []
        extra += [f"experts over {self.expert_ranks} ranks"] if self.experts_over != "none" else []
        return " x ".join(used) + (f" ({', '.join(extra)})" if extra else "") if used else "one device"


def fit(world: int, layout: Layout) -> Layout:
    """The layout with data parallelism taking what is left of the world; raises with what would fit when it does
    not."""
    fixed = layout.pp * layout.fsdp * layout.cp * layout.tp
    if fixed <= world and world % fixed == 0 and layout.dp in (1, world // fixed):
        return _with_experts(layout if layout.dp == world // fixed else replace(layout, dp=world // fixed))
    degrees = " x ".join(f"{CONFIG_KEYS[a]}={getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1)
    near = [n for n in range(max(1, world // 2), 2 * max(world, fixed) + 1) if n % fixed == 0][:3]
    needed = f"a multiple of {fixed}"
    if layout.dp > 1:  # a written number of replicas is all there are
        near, needed = [layout.size], str(layout.size)
    smaller = _divisors_that_fit(world, layout)
    raise PlanError(
        f"{degrees} needs {needed} ranks; there {'is' if world == 1 else 'are'} {world}",
        where=", ".join(CONFIG_KEYS[a] for a in AXES if getattr(layout, a) > 1),
        fix=f"start {' or '.join(map(str, near))} ranks, or on {world}: {'; '.join(smaller)}",
    )


def _with_experts(layout: Layout) -> Layout:
    """Checks what the experts are dealt to, now that the number of data ranks is known."""
    if layout.experts == "world" and layout.tp > 1 and not layout.sequence_parallel:
        raise PlanError(
            "experts over all ranks: tensor-parallel ranks have the same tokens unless sequences are cut over them",
            where="moe_group, sequence_parallel",
            fix="sequence_parallel: True, or moe_group: mp",
        )
    pool = layout.expert_pool
    if pool % layout.expert_ranks:
        divisors = [n for n in range(2, pool + 1) if pool % n == 0]
        near = sorted(divisors, key=lambda n: abs(n - layout.ep))[:3]
        raise PlanError(
            f"expert_parallel_degree={layout.ep} does not divide the {counted(pool, 'rank')} that experts are dealt to",
            where="expert_parallel_degree, moe_group",
            fix=f"expert_parallel_degree: {' or '.join(map(str, sorted(near)))}" if near else "moe_group: dummy",
        )
    return layout


def _divisors_that_fit(world: int, layout: Layout) -> list[str]:
    """Up to three layouts of this world nearest to the requested one: the same axes, smaller degrees."""
    options = []
    for tp in (d for d in range(layout.tp, 0, -1) if world % d == 0):
        for pp in (d for d in range(layout.pp, 0, -1) if (world // tp) % d == 0):
            rest = world // (tp * pp)
            for fsdp in (d for d in range(layout.fsdp, 0, -1) if rest % d == 0):
                options.append(f"tp {tp} x pp {pp} x sharding {fsdp} x dp {rest // fsdp}")
    return options[:3] or [f"dp {world}"]
