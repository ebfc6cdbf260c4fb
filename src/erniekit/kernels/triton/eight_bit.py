"""8-bit integer weights unpacked into scratch memory in one pass, for NVIDIA cards. kernels/stored/int8.py defines the
same in torch, whose own kernel for two types and a scale a row takes six times as long."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, WARPS = 2048, 4  # of a program, all of one row


@triton.jit
def _scale(codes, scales, out, width, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = columns < width
    numbers = tl.load(codes + row * width + columns, mask=inside, other=0).to(tl.float32)
    result = numbers * tl.load(scales + row).to(tl.float32)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def unpacked(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes int8 [.., in], scales [.., 1] -> [.., in]. Integers and scales are exact in fp32, so rounded once."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if out.numel():
        width = codes.shape[-1]
        block = min(COLUMNS, triton.next_power_of_2(width))
        grid = (codes.numel() // width, triton.cdiv(width, block))
        _scale[grid](codes, scales, out, width, BC=block, num_warps=WARPS)
    return out
