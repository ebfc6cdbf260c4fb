"""An fp32 master weight as two 16-bit halves: the bf16 weight that the model computes with, and an int16 remainder.

Used by kernels/adamw.py for `master_weights: exact16`; kernels/triton/lean_adamw.py does the same on a card.

The weight is the master rounded to bf16 with ties away from zero ("half up" on the bits), not to even. Then
`bits(master) = (bits(weight) << 16) + remainder` for a signed remainder, so that all 2**32 patterns come back. Rounded
to even, a tie gives a remainder of +-2**15, which is one value too many for 16 bits.
"""

from __future__ import annotations

import torch

QUIET_NAN = 0x7FC00000


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 -> (bf16 weight, int16 remainder). A NaN is made the quiet one first: the largest NaN patterns would round
    over the sign bit to a weight of -0, and the fault would be hidden."""
    bits = master.contiguous().view(torch.int32)
    bits = torch.where(master.isnan(), QUIET_NAN, bits)
    weight = ((bits + 0x8000) >> 16).to(torch.int16)
    return weight.view(torch.bfloat16), bits.to(torch.int16)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The master of a pair that `split` made."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)
