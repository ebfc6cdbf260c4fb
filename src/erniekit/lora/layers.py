"""The trainable side of LoRA: a frozen layer plus low-rank updates, one pair for each public projection inside it.

Put in place by inject.py. Parameters are `<layer>.lora.<q_proj | ... | shared>.{A,B}`; the frozen layer is `.base`.
r rank, T any leading dims, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from erniekit.kernels.expert_mlp import Update
from erniekit.kernels.lora_linear import RowUpdate, in_one_op, lora_linear
from erniekit.kernels.stored import Stored
from erniekit.model_contract import parts_of
from erniekit.models.layers.experts import ExpertLinear
from erniekit.models.layers.linear import HoldsWeight, Linear, is_watched
from erniekit.models.layers.router import Router, Routing

SHARED = "shared"  # the key of a pair whose one A serves several projections

Parts = tuple[tuple[str, int], ...]


class Pair(nn.Module):
    """y += scale * B A x on the rows of `parts` ((public name, rows), in row order).

    experts: so many updates of that shape, A [experts * r, in] and B [experts * rows, r], expert after expert.
    starts: PiSSA, whose A and B begin as a part of the weight; A0 and B0 are what they began as, B0 negated, and take
    that part off the weight again: y += scale * (B A + B0 A0) x. magnitudes: DoRA's, of each row (dora.py).
    """

    def __init__(
        self,
        parts: Parts,
        rank: int,
        scale: float,
        like: torch.Tensor,
        experts: int = 1,
        dtype: torch.dtype | None = None,
        starts: bool = False,
        magnitudes: bool = False,
    ) -> None:
        super().__init__()
        self.parts, self.rank, self.scale, self.experts = parts, rank, scale, experts
        dtype = dtype or like.dtype
        self.A = nn.Parameter(torch.zeros(experts * rank, like.shape[1], dtype=dtype, device=like.device))
        self.B = nn.Parameter(torch.zeros(experts * self.rows, rank, dtype=dtype, device=like.device))
        self.starts = starts
        if starts:
            self.A0, self.B0 = (nn.Parameter(torch.zeros_like(side), requires_grad=False) for side in (self.A, self.B))
        rows = torch.zeros(self.rows, dtype=dtype, device=like.device)
        self.magnitude = nn.Parameter(rows) if magnitudes else None

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The A and the B of all that is added, [whole rank, in] and [rows, whole rank]."""
        if not self.starts:
            return self.A, self.B
        return torch.cat((self.A, self.A0)), torch.cat((self.B, self.B0), dim=1)

    @property
    def whole_rank(self) -> int:
        return 2 * self.rank if self.starts else self.rank

    @property
    def rows(self) -> int:
        """Of one expert's B."""
        return sum(n for _, n in self.parts)

    @torch.no_grad()
    def reset(self, *generators: torch.Generator) -> None:
        """A Kaiming-uniform(a = sqrt 5), which is +-1/sqrt(in); B zero. Drawn on the CPU in fp32 for any device, with a
        generator for each expert."""
        bound, width = 1.0 / math.sqrt(self.A.shape[1]), self.A.shape[1]
        in_place = self.A.dtype == torch.float32 and self.A.device.type == "cpu"
        drawn = self.A if in_place else torch.empty(self.A.shape, dtype=torch.float32)
        for one, generator in zip(drawn.view(len(generators), -1, width), generators, strict=True):
            one.uniform_(-bound, bound, generator=generator)
        if not in_place:
            self.A.copy_(drawn)
        self.B.zero_()

    def updates(
        self, A: torch.Tensor, B: torch.Tensor, magnitude: torch.Tensor | None = None
    ) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """(expert, part, its A [r, in], its B [rows, r], its magnitudes) of the whole matrices, which need not be this
        pair's own."""
        rows = [n for _, n in self.parts]
        sizes: Sequence[torch.Tensor | None] = [None] * len(rows) if magnitude is None else magnitude.split(rows)
        for expert, (a, b) in enumerate(zip(A.split(self.whole_rank), B.split(self.rows), strict=True)):
            for (part, _), b_part, size in zip(self.parts, b.split(rows), sizes):
                yield expert, part, a, b_part, size


class LoRALayer(nn.Module):
    """A frozen layer with pairs on some or all of its parts."""

    def __init__(self, base: nn.Module, parts: Parts, pairs: dict[str, Pair]) -> None:
        super().__init__()
        self.base: Any = base
        self.parts = parts  # attention and mlp split their fused output by this
        self.lora = nn.ModuleDict(pairs)
        self.active = True  # False: only the frozen layer (adapters_off.py)

    @property
    def weight(self) -> torch.Tensor:
        return cast("torch.Tensor", self.base.weight)

    def pairs(self) -> dict[str, Pair]:
        return cast("dict[str, Pair]", dict(self.lora.items()))

    def _added(self, y: torch.Tensor, updates: Sequence[torch.Tensor]) -> torch.Tensor:
        """y with each pair's update on the columns of its parts."""
        pairs = list(self.pairs().values())
        if len(pairs) == 1 and updates[0].shape[-1] == y.shape[-1]:
            return torch.add(y, updates[0], alpha=pairs[0].scale)
        by_part: dict[str, tuple[torch.Tensor, float]] = {}
        for pair, update in zip(pairs, updates):
            for (part, _), piece in zip(pair.parts, update.split([n for _, n in pair.parts], dim=-1)):
                by_part[part] = (piece, pair.scale)
        out = []
        for (part, _), piece in zip(self.parts, y.split([n for _, n in self.parts], dim=-1)):
            out.append(torch.add(piece, by_part[part][0], alpha=by_part[part][1]) if part in by_part else piece)
        return torch.cat(out, dim=-1)


class LoRALinear(LoRALayer):
    """A linear, fused or plain."""

    base: Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_watched(self.base):
            # Also without adapters: a reference then differs from a policy only by the adapters, not by rounding.
            given = self.base.stored(), self.base.added_bias, self.row_updates() if self.active else []
            if in_one_op(x, *given):
                self.base.observe(x)
                return lora_linear(x, *given)
        y: torch.Tensor = self.base(x)
        if not self.active:
            return y
        return self._added(y, self._products(x))

    def _products(self, x: torch.Tensor) -> list[torch.Tensor]:
        """B A x of every pair."""
        sides = [pair.sides for pair in self.pairs().values()]
        # One GEMM for the A side of all pairs: [T, in] -> [T, sum of ranks].
        A = sides[0][0] if len(sides) == 1 else torch.cat([A for A, _ in sides])
        low = F.linear(x, A).split([A.shape[0] for A, _ in sides], dim=-1)
        return [F.linear(low_pair, B) for low_pair, (_, B) in zip(low, sides)]

    def row_updates(self) -> list[RowUpdate]:
        rows, start = {}, 0
        for part, n in self.parts:
            rows[part] = (start, start + n)
            start += n
        return [
            RowUpdate(*pair.sides, pair.scale, tuple(rows[part] for part, _ in pair.parts))
            for pair in self.pairs().values()
        ]


class LoRAExperts(LoRALayer):
    """All experts of a projection: the expert op adds their updates."""

    base: ExpertLinear

    def matrices(self) -> Stored:
        """[E, out, in], frozen."""
        return self.base.matrices()

    def updates(self) -> dict[str, Update]:
        """By part; where parts share an A each has it. Without adapters updates of zero: the same kernels run, so that
        a reference differs from a policy only by the adapters, not by rounding."""
        out = {}
        for pair in self.pairs().values():
            whole = pair.B if self.active else torch.zeros_like(pair.B)
            A, B = pair.A.unflatten(0, (-1, pair.rank)), whole.unflatten(0, (-1, pair.rows))
            for (part, _), b in zip(pair.parts, B.split([n for _, n in pair.parts], dim=1)):
                out[part] = Update(A, b, pair.scale)
        return out


class LoRARouter(LoRALayer):
    """A router, adapted where its name is among the targets: its fp32 weight is changed, and with it all its
    outputs."""

    @property
    def weight(self) -> torch.Tensor:
        (pair,) = self.pairs().values()
        if not self.active:
            return cast("torch.Tensor", self.base.weight)
        return cast("torch.Tensor", self.base.weight.float() + pair.scale * (pair.B.float() @ pair.A.float()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # other attributes of a router: how many experts, its bias
            return getattr(super().__getattr__("base"), name)

    def forward(self, x_TH: torch.Tensor, bias: torch.Tensor | None = None) -> Routing:
        with torch.autocast(x_TH.device.type, enabled=False):
            weight = self.weight
        return cast("Routing", functional_call(self.base, {"weight": weight}, (x_TH, bias)))


KINDS: dict[type[nn.Module], type[LoRALayer]] = {
    Linear: LoRALinear,
    ExpertLinear: LoRAExperts,
    Router: LoRARouter,
}


def kind_of(base: nn.Module) -> type[LoRALayer] | None:
    """How a layer is adapted; None: it is not."""
    return next((kind for plain, kind in KINDS.items() if isinstance(base, plain)), None)


def layer_parts(base: nn.Module, name: str) -> Parts:
    """The public projections inside a layer (of one expert, where it has several): its parts, or itself as `name`."""
    return parts_of(base) or ((name, weight_like(base).shape[0]),)


def weight_like(base: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A layer's weight, or where that is packed a view without memory of its shape and device."""
    if isinstance(base, HoldsWeight) and base.weight is None:
        return cast("torch.Tensor", base.packed_data).new_empty((), dtype=dtype).expand(base.held_shape)
    return cast("torch.Tensor", base.weight)


def experts_of(base: nn.Module) -> int:
    """How many sets of its parts a layer holds."""
    return base.experts if isinstance(base, ExpertLinear) else 1
