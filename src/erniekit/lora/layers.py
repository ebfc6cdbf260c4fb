"""The trainable side of LoRA: a frozen linear plus low-rank updates, one pair for each public projection inside it.

Put in place by inject.py. Parameters are `<linear>.lora.<q_proj | ... | shared>.{A,B}`; the frozen linear is `.base`.
r rank, T any leading dims.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.models.layers.linear import parts_of

SHARED = "shared"  # the key of a pair whose one A serves several projections


class Pair(nn.Module):
    """y += scale * B A x on the rows of `parts` ((public name, rows), in row order)."""

    def __init__(self, parts: tuple[tuple[str, int], ...], rank: int, scale: float, like: torch.Tensor) -> None:
        super().__init__()
        self.parts, self.rank, self.scale = parts, rank, scale
        rows = sum(n for _, n in parts)
        self.A = nn.Parameter(torch.zeros(rank, like.shape[1], dtype=like.dtype, device=like.device))
        self.B = nn.Parameter(torch.zeros(rows, rank, dtype=like.dtype, device=like.device))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """A Kaiming-uniform(a = sqrt 5), which is +-1/sqrt(in); B zero. Drawn on the CPU in fp32 for any device."""
        bound = 1.0 / math.sqrt(self.A.shape[1])
        drawn = torch.empty(self.A.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        self.A.copy_(drawn)
        self.B.zero_()


class LoRALinear(nn.Module):
    """A linear (fused or plain) with pairs on some or all of its parts."""

    def __init__(self, base: nn.Linear, name: str, pairs: dict[str, Pair]) -> None:
        super().__init__()
        self.base = base
        self.parts = parts_of(base, name)  # attention and mlp split their fused output by this
        self.lora = nn.ModuleDict(pairs)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def pairs(self) -> dict[str, Pair]:
        return cast("dict[str, Pair]", dict(self.lora.items()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        pairs = list(self.pairs().values())
        # One GEMM for the A side of all pairs: [T, in] -> [T, sum of ranks].
        A = pairs[0].A if len(pairs) == 1 else torch.cat([pair.A for pair in pairs])
        low = F.linear(x, A).split([pair.rank for pair in pairs], dim=-1)
        if len(pairs) == 1 and pairs[0].B.shape[0] == y.shape[-1]:
            return torch.add(y, F.linear(low[0], pairs[0].B), alpha=pairs[0].scale)
        update: dict[str, tuple[torch.Tensor, float]] = {}
        for pair, low_pair in zip(pairs, low):
            rows = [n for _, n in pair.parts]
            for (part, _), piece in zip(pair.parts, F.linear(low_pair, pair.B).split(rows, dim=-1)):
                update[part] = (piece, pair.scale)
        out = []
        for (part, _), piece in zip(self.parts, y.split([n for _, n in self.parts], dim=-1)):
            out.append(torch.add(piece, update[part][0], alpha=update[part][1]) if part in update else piece)
        return torch.cat(out, dim=-1)
