"""Rows to fp8 with a scale each, and the taking of such rows by expert, for NVIDIA cards. Called by
kernels/fp8_product.py and expert_mlp.py; kernels/fp8_product.py and expert_fp8.py define them in torch.

A program of `quantise` has one row. Up to WIDE numbers it holds in registers between finding the largest and dividing
by it; a longer row is read a second time, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from erniekit.kernels.triton.expert_rows import (
    TAKE,
    Low,
    blocks_of,
    low_tile,
    padded,
    rows_of_block,
    sizes,
    store_narrow,
    store_wide,
    strides,
    wide_tile,
)

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


@triton.jit
def _take(
    x, x8, scales, row_of, ends, out, out_scales, low, L0, L1, E, s0, s1, e0, r0, w0, e1, r1, w1,
    N0: tl.constexpr, N1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, left = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    i = tl.arange(0, BM)
    live = i < left
    choice = tl.load(row_of + first + tl.minimum(i, left - 1)).to(tl.int32)
    token = (choice // K).to(tl.int64)
    first, expert = first.to(tl.int64), expert.to(tl.int64)
    tl.store(out_scales + first + i, tl.load(scales + token), mask=live)
    low += first * (N0 + N1)
    out += first * W
    if P0 > 0:
        a0 = tl.zeros((BM, P0), tl.float32)
        i0 = tl.arange(0, P0)
        L0 += expert * e0
    if P1 > 0:
        a1 = tl.zeros((BM, P1), tl.float32)
        i1 = tl.arange(0, P1)
        L1 += expert * e1
    for c in tl.range(0, W, BN, num_stages=STAGES):
        cols = c + tl.arange(0, BN)
        store_wide(out, i, cols, live, wide_tile(x8, token, cols, W, W, EVEN), W, W, EVEN)
        if P0 > 0:
            tile = wide_tile(x, token, cols, W, W, EVEN)
            a0 = tl.dot(tile, tl.trans(low_tile(L0, i0, cols, r0, w0, N0, P0, W, EVEN)), a0)
            if P1 > 0:
                a1 = tl.dot(tile, tl.trans(low_tile(L1, i1, cols, r1, w1, N1, P1, W, EVEN)), a1)
    if P0 > 0:
        store_narrow(low, i, i0, live, a0 * s0, N0 + N1, N0)
    if P1 > 0:
        store_narrow(low + N0, i, i1, live, a1 * s1, N0 + N1, N1)


def take(
    x: torch.Tensor,
    small: tuple[torch.Tensor, torch.Tensor],
    row_of: torch.Tensor,
    k: int,
    ends: torch.Tensor,
    lows: list[Low],
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """As kernels/expert_fp8.py's; fp8 numbers are moved as the bytes they are."""
    R, W, E, t = row_of.shape[0], x.shape[1], ends.shape[0], TAKE
    x8, scales = small
    out, out_scales = x8.new_empty(R, W), scales.new_empty(R, 1)
    low = x.new_empty(R, sum(factor.shape[1] for factor, _ in lows))
    (L0, s0), (L1, s1) = [*lows, (None, 0.0), (None, 0.0)][:2]
    n0, n1 = (0 if L is None else L.shape[1] for L in (L0, L1))
    _take[(blocks_of(R, E, t.rows),)](
        x, x8.view(torch.uint8), scales, row_of, ends, out.view(torch.uint8), out_scales, low, L0, L1, E, s0, s1,
        *strides(L0), *strides(L1), N0=n0, N1=n1, P0=padded(n0), P1=padded(n1), K=k,
        BE=triton.next_power_of_2(E), **sizes(t, W, max(n0, n1)),
    )  # fmt: skip
    return (out, out_scales), low
