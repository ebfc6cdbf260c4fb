"""Weights in MXFP4: e2m1 values, a power of two for each 32 columns of a row (kernels/mxfp4.py has the rules).

Where the scales of each row lie within 2 ** 14 of each other, e2m1 times its scale over the row's largest is exact in
fp8 (e4m3: from 2 ** -9 to 448): `mxfp4-fp8` multiplies so. A weight with a wider row is kept as `mxfp4`, and its
products stay 16 bit.
"""

from __future__ import annotations

import torch

from erniekit.kernels import mxfp4
from erniekit.kernels.available import runs_triton
from erniekit.kernels.stored.base import Agree, Stored, WeightKind
from erniekit.kernels.stored.fp8 import MultipliedInFp8

TOP = 6  # 6, the largest of e2m1, times 2 ** 6 is below 448
RANGE = 14  # powers below the top at which 0.5 and 1.5 are still exact: 2 ** -9 and 1.5 * 2 ** -8
LEAST = 32  # a row's largest scale counts as this byte at least, so that its fp32 scale is normal


class Mxfp4(WeightKind):
    name = "mxfp4"
    exact_in_fp8 = True

    def fits(self, out: int, width: int) -> bool:
        return width % mxfp4.GROUP == 0

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        return Stored(*mxfp4.encode(weight), kind=self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "e2m1", weight.scale, dtype)
        return mxfp4.decode(weight.data, weight.scale, dtype)

    def shape(self, weight: Stored) -> tuple[int, int]:
        return weight.data.shape[-2], 2 * weight.data.shape[-1]


class Mxfp4InFp8(MultipliedInFp8, Mxfp4):
    """`extra` is the largest scale of each row."""

    name = "mxfp4-fp8"

    def fits(self, out: int, width: int) -> bool:
        return Mxfp4.fits(self, out, width) and MultipliedInFp8.fits(self, out, width)

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        codes, scales = mxfp4.encode(weight)
        most = _largest(scales)
        if agree is not None:
            most = agree(most.float()).to(torch.uint8)
        lowest = most.clamp(min=LEAST) - RANGE
        for few, bytes_, least in zip(codes.split(mxfp4.CHUNK), scales.split(mxfp4.CHUNK), lowest.split(mxfp4.CHUNK)):
            filled = (few.unflatten(-1, (-1, mxfp4.GROUP // 2)) & 0x77).amax(-1) > 0
            if (filled & (bytes_ < least)).any():
                return Stored(codes, scales, kind=Mxfp4.name)
        return Stored(codes, scales, most.clamp(min=LEAST), kind=self.name)

    def image(self, weight: Stored) -> torch.Tensor:
        assert weight.scale is not None
        assert weight.extra is not None
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "e2m1", weight.scale, torch.float8_e4m3fn, weight.extra)
        above = (weight.scale.int() - weight.extra.int() + TOP + mxfp4.BIAS).clamp(min=0).to(torch.uint8)
        return mxfp4.decode(weight.data, above, torch.float32).to(torch.float8_e4m3fn)

    def turned_image(self, weight: Stored) -> torch.Tensor:
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            fp8 = torch.float8_e4m3fn
            return four_bit.unpacked(weight.data, "e2m1", weight.scale, fp8, weight.extra, turned=True)
        return super().turned_image(weight)

    def row_scale(self, weight: Stored) -> torch.Tensor:
        assert weight.extra is not None
        return mxfp4.powers(weight.extra.int() - TOP)


def _largest(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 1]; without columns 0."""
    return scales.amax(-1, keepdim=True) if scales.shape[-1] else scales.new_zeros(len(scales), 1)
