"""Weights in NF4, blocks of 64 columns, with double quantisation (kernels/nf4.py has the tables).

The codes are those of bitsandbytes. Its second quantisation is of the difference from the mean of all blocks, 256 of
them at a time whichever rows they belong to; here it is of a row's blocks only, by the row's largest one: what is kept
of a row then depends on nothing else, and a cut between columns changes nothing.
"""

from __future__ import annotations

import torch

from erniekit.kernels import integers, nf4
from erniekit.kernels.available import runs_triton
from erniekit.kernels.stored.base import Agree, Stored, WeightKind


class Nf4(WeightKind):
    """`scale` has codes of the blocks' largest magnitudes, `extra` the row's, fp32."""

    name = "nf4"

    def fits(self, out: int, width: int) -> bool:
        return width % nf4.BLOCK == 0

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        codes, absmax = nf4.encode(weight)
        most = integers.largest(absmax)
        if agree is not None:
            most = agree(most)
        scale = nf4.nearest_dynamic(absmax / torch.where(most == 0, 1.0, most), signed=False)
        return Stored(codes, scale, most, self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        assert weight.extra is not None
        absmax = nf4.dynamic_values(weight.scale, signed=False) * weight.extra
        if runs_triton(weight.data):
            from erniekit.kernels.triton import four_bit

            return four_bit.unpacked(weight.data, "nf4", absmax, dtype)
        return nf4.decode(weight.data, absmax, dtype)

    def shape(self, weight: Stored) -> tuple[int, int]:
        return weight.data.shape[-2], 2 * weight.data.shape[-1]
