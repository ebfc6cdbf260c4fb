"""Weights as 4-bit integers, a bf16 scale for each 64 columns of a row, chosen for the least squared error.

A few large numbers cost a group little if they are cut and the others are kept finer. A group is smaller than any cut
between columns of ERNIE's weights, so that each rank packs its own as the whole would be packed.

Packing what was unpacked finds the same numbers again. The largest of a group is then 7 or, negative, 8 times its
scale: both shares are tried. Scales are sevenths of bf16 numbers, which rounding 7 times a scale to bf16 leaves
recognisable. The error is that of the numbers as the weight's dtype has them: it is 0 for the group's own scale.
"""

from __future__ import annotations

import torch

from erniekit.kernels import integers
from erniekit.kernels.available import runs_triton
from erniekit.kernels.nibbles import pack_signed, unpack_signed
from erniekit.kernels.stored.base import Agree, Stored, WeightKind

GROUP = 64
LOW, HIGH = -8, 7
# Shares of the largest number that are tried as the highest integer.
KEPT = (*(1 - step / 20 for step in range(11)), HIGH / -LOW)
CHUNK = 1024  # rows at a time, each tried with every share


class Int4Group(WeightKind):
    name = "int4-group"

    def fits(self, out: int, width: int) -> bool:
        return width % GROUP == 0

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        rows, width = weight.shape
        data = torch.empty(rows, width // 2, dtype=torch.uint8, device=weight.device)
        scale = torch.empty(rows, width // GROUP, dtype=torch.bfloat16, device=weight.device)
        for few, out, by in zip(weight.split(CHUNK), data.split(CHUNK), scale.split(CHUNK), strict=True):
            groups = few.float().unflatten(-1, (-1, GROUP))
            best = least_error(groups, weight.dtype)
            by.copy_(best.squeeze(-1))
            out.copy_(pack_signed(integers.rounded(groups, best, LOW, HIGH).flatten(-2)))
        return Stored(data, scale, kind=self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "int4", weight.scale, dtype)
        groups: torch.Tensor = unpack_signed(weight.data).unflatten(-1, (-1, GROUP))
        return (groups * weight.scale.to(dtype).unsqueeze(-1)).flatten(-2)

    def shape(self, weight: Stored) -> tuple[int, int]:
        return weight.data.shape[-2], 2 * weight.data.shape[-1]


def least_error(groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """groups fp32 [.., GROUP], of a weight of dtype -> bf16 scales [.., 1]: the best of the shares tried, the first
    where several are."""
    most = integers.largest(groups)
    best = integers.scale_of(most, HIGH)
    least = torch.full_like(most, torch.inf)
    for kept in KEPT:
        scale = integers.scale_of((most * kept).bfloat16().float(), HIGH)
        kept_as = (integers.rounded(groups, scale, LOW, HIGH) * scale).to(dtype)
        error = (kept_as - groups).square_().sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best
