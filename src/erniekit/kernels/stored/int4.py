"""Weights as 4-bit integers, a bf16 scale for each row: Paddle's `weight_only_int4`, two columns a byte.

Integers up to 7 are exact in fp8 (e4m3): `int4-fp8` keeps the same bytes and multiplies in fp8, with the scales applied
to the result. Each direction unpacks into scratch memory in the order in which it reads it.
"""

from __future__ import annotations

import torch

from erniekit.kernels import integers
from erniekit.kernels.available import runs_triton
from erniekit.kernels.nibbles import pack_signed, unpack_signed
from erniekit.kernels.stored.base import Agree, Stored, WeightKind
from erniekit.kernels.stored.fp8 import MultipliedInFp8

HIGHEST = 7


class Int4(WeightKind):
    name = "int4"
    exact_in_fp8 = True

    def fits(self, out: int, width: int) -> bool:
        return width % 2 == 0

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        most = integers.largest(weight)
        scale = integers.scale_of(agree(most) if agree else most, HIGHEST)
        rows, width = weight.shape
        data = torch.empty(rows, width // 2, dtype=torch.uint8, device=weight.device)
        size = integers.CHUNK
        for out, few, by in zip(data.split(size), weight.split(size), scale.split(size), strict=True):
            out.copy_(pack_signed(integers.rounded(few, by, -HIGHEST, HIGHEST)))
        return Stored(data, scale, kind=self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "int4", weight.scale, dtype)
        return unpack_signed(weight.data) * weight.scale.to(dtype)

    def shape(self, weight: Stored) -> tuple[int, int]:
        return weight.data.shape[-2], 2 * weight.data.shape[-1]


class Int4InFp8(MultipliedInFp8, Int4):
    name = "int4-fp8"

    def fits(self, out: int, width: int) -> bool:
        return Int4.fits(self, out, width) and MultipliedInFp8.fits(self, out, width)

    def image(self, weight: Stored) -> torch.Tensor:
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "int4", None, torch.float8_e4m3fn)
        return unpack_signed(weight.data).to(torch.float8_e4m3fn)

    def turned_image(self, weight: Stored) -> torch.Tensor:
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "int4", None, torch.float8_e4m3fn, turned=True)
        return super().turned_image(weight)

    def row_scale(self, weight: Stored) -> torch.Tensor:
        return super().row_scale(weight).float()
