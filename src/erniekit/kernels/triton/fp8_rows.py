"""Rows to fp8 with a scale each, for NVIDIA cards. Called by kernels/fp8_product.py, which defines them in torch.

A program has one row. Up to WIDE numbers it holds in registers between finding the largest and dividing by it; a longer
row is read a second time, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE = 8192
LEAST = tl.constexpr(1e-30)  # as kernels/fp8_product.py has it
HIGHEST = tl.constexpr(448.0)


@triton.jit
def _quantise(x, out, scales, by_row, K: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * by_row
    out += row * K
    lanes = tl.arange(0, BLOCK)
    if ONCE:
        values = tl.load(x + lanes, mask=lanes < K, other=0.0).to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(values), 0), LEAST)
        # The card's conversion saturates and keeps what is not a number, so nothing is cut here.
        tl.store(out + lanes, (values * (HIGHEST / most)).to(out.dtype.element_ty), mask=lanes < K)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, K, BLOCK):
            at = start + lanes
            largest = tl.maximum(largest, tl.abs(tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)))
        most = tl.maximum(tl.max(largest, 0), LEAST)
        for start in range(0, K, BLOCK):
            at = start + lanes
            values = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            tl.store(out + at, (values * (HIGHEST / most)).to(out.dtype.element_ty), mask=at < K)
    tl.store(scales + row, most / HIGHEST)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K]; rows of a matrix may lie apart, anything else is copied together first."""
    width = x.shape[-1]
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if flat.shape[0]:
        once = width <= WIDE
        block = triton.next_power_of_2(width) if once else WIDE // 2
        warps = min(8, max(1, block // 512))
        _quantise[(flat.shape[0],)](flat, out, scales, flat.stride(0), K=width, BLOCK=block, ONCE=once, num_warps=warps)
    return out, scales
