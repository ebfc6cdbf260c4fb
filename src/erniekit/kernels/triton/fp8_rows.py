"""Rows to fp8 with a scale each, and fp8 matrices transposed, for NVIDIA cards. kernels/quantised_rows.py and
kernels/fp8_product.py define both in torch.

A program has one row. Up to WIDE numbers it holds in registers between finding the largest and dividing by it; a longer
row is read a second time, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE = 8192
TILE = 128  # rows and columns that a program transposes
LEAST = tl.constexpr(1e-30)  # as kernels/quantised_rows.py has it
HIGHEST = tl.constexpr(448.0)


@triton.jit
def _load(x, factor, at, K: tl.constexpr, FACTOR: tl.constexpr):
    values = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    if FACTOR:
        values *= tl.load(factor + at, mask=at < K, other=0.0)
    return values


@triton.jit
def _quantise(
    x, out, scales, factor, ends, row_of, by_row, E, CHOICES: tl.constexpr, FACTOR: tl.constexpr,
    BY_EXPERT: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """CHOICES > 0: x has tokens, of which row r is that of choice row_of[r]."""
    row = tl.program_id(0).to(tl.int64)
    if BY_EXPERT:
        i = tl.arange(0, BE)
        end = tl.load(ends + i, mask=i < E, other=2147483647)
        expert = tl.sum((end <= row).to(tl.int32), 0)
        if expert >= E:
            return
        factor += expert.to(tl.int64) * K
    if CHOICES > 0:
        x += (tl.load(row_of + row) // CHOICES).to(tl.int64) * by_row
    else:
        x += row * by_row
    out += row * K
    lanes = tl.arange(0, BLOCK)
    if ONCE:
        values = _load(x, factor, lanes, K, FACTOR)
        most = tl.maximum(tl.max(tl.abs(values), 0), LEAST)
        # The card's conversion saturates and keeps what is not a number, so nothing is cut here.
        tl.store(out + lanes, (values * (HIGHEST / most)).to(out.dtype.element_ty), mask=lanes < K)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, K, BLOCK):
            largest = tl.maximum(largest, tl.abs(_load(x, factor, start + lanes, K, FACTOR)))
        most = tl.maximum(tl.max(largest, 0), LEAST)
        for start in range(0, K, BLOCK):
            at = start + lanes
            values = _load(x, factor, at, K, FACTOR)
            tl.store(out + at, (values * (HIGHEST / most)).to(out.dtype.element_ty), mask=at < K)
    tl.store(scales + row, most / HIGHEST)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K]; rows of a matrix may lie apart, anything else is copied together first."""
    return _rows(x, x.shape[:-1])


def quantise_with(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows(x, x.shape[:-1], factor)


def quantise_by_expert(
    x: torch.Tensor, factor: torch.Tensor, ends: torch.Tensor, row_of: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    count = x.shape[0] if row_of is None else row_of.shape[0]
    return _rows(x, (count,), factor, ends, row_of, k)


def _rows(
    x: torch.Tensor,
    leading: tuple[int, ...],
    factor: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    row_of: torch.Tensor | None = None,
    k: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    out = torch.empty(*leading, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*leading, 1, dtype=torch.float32, device=x.device)
    count = scales.numel()
    if count:
        once = width <= WIDE
        block = triton.next_power_of_2(width) if once else WIDE // 2
        experts = 0 if ends is None else ends.shape[0]
        factor = None if factor is None else factor.contiguous()
        _quantise[(count,)](
            flat, out, scales, factor, ends, row_of, flat.stride(0), experts, CHOICES=0 if row_of is None else k,
            FACTOR=factor is not None, BY_EXPERT=ends is not None, BE=triton.next_power_of_2(max(1, experts)),
            K=width, BLOCK=block, ONCE=once, num_warps=min(8, max(1, block // 512)),
        )  # fmt: skip
    return out, scales


@triton.jit
def _transpose(x, out, M, N, T: tl.constexpr):
    matrix = tl.program_id(2).to(tl.int64) * M * N
    rows, cols = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    there = (rows[:, None] < M) & (cols[None, :] < N)
    tile = tl.load(x + matrix + rows[:, None].to(tl.int64) * N + cols[None, :], mask=there, other=0)
    back = (cols[:, None] < N) & (rows[None, :] < M)
    tl.store(out + matrix + cols[:, None].to(tl.int64) * M + rows[None, :], tl.trans(tile), mask=back)


def transposed(image: torch.Tensor) -> torch.Tensor:
    """Moved as the bytes they are."""
    *experts, rows, cols = image.shape
    flat = image.contiguous().view(torch.uint8)
    out = torch.empty(*experts, cols, rows, dtype=torch.uint8, device=image.device)
    count = experts[0] if experts else 1
    if out.numel():
        _transpose[(triton.cdiv(rows, TILE), triton.cdiv(cols, TILE), count)](
            flat, out, rows, cols, T=TILE, num_warps=8
        )
    return out.view(image.dtype)
