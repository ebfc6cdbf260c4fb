"""Weights as 8-bit integers, a bf16 scale for each row: Paddle's `weight_only_int8`. Products are of the unpacked
weight: rounding its 8 bits further to fp8's 4 would cost as much as fp8 does."""

from __future__ import annotations

import torch

from erniekit.kernels import integers
from erniekit.kernels.available import runs_triton
from erniekit.kernels.stored.base import Agree, Stored, WeightKind

HIGHEST = 127


class Int8(WeightKind):
    name = "int8"

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        most = integers.largest(weight)
        scale = integers.scale_of(agree(most) if agree else most, HIGHEST)
        data = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        size = integers.CHUNK
        for out, rows, by in zip(data.split(size), weight.split(size), scale.split(size), strict=True):
            out.copy_(integers.rounded(rows, by, -HIGHEST, HIGHEST))
        return Stored(data, scale, kind=self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        if runs_triton(weight.data):
            from erniekit.kernels.triton import eight_bit

            return eight_bit.unpacked(weight.data.contiguous(), weight.scale.contiguous(), dtype)
        return weight.data * weight.scale.to(dtype)  # one pass; both are exact in dtype, so rounded once
