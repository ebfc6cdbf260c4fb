"""Rows to fp8 with a scale each, and fp8 matrices transposed, for NVIDIA cards. kernels/quantised_rows.py and
kernels/fp8_product.py define both in torch.

A program walks over rows, of one expert where experts have factors: it looks up the expert and reads the factors once.
Up to WIDE numbers a row stays in registers between finding its largest and dividing by it, in two pieces (2560 is 2048
and 512), so that no lane idles; longer rows are read a second time, from the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from erniekit.kernels.triton.expert_tiles import blocks_of, rows_of_block

WIDE = 8192
LONG = 2048  # numbers of each row at a time beyond that
TILE = 128  # rows and columns that a program transposes
LEAST = tl.constexpr(1e-30)  # as kernels/quantised_rows.py has it
HIGHEST = tl.constexpr(448.0)


class Walk(NamedTuple):
    """How a program goes over its rows."""

    rows: int  # of a program: their factors are read once
    step: int  # rows at a time
    held: int  # numbers a thread holds at most
    stages: int  # steps whose rows are on their way at a time


PLAIN = Walk(2, 2, 96, 1)
BY_EXPERT = Walk(16, 1, 24, 4)


@triton.jit
def _numbers(source, columns, factor, K: tl.constexpr, FACTOR: tl.constexpr, WHOLE: tl.constexpr):
    """fp32 [rows, columns], with their factors in them. WHOLE: all columns are there."""
    at = source[:, None] + columns[None, :]
    if WHOLE:
        values = tl.load(at).to(tl.float32)
    else:
        values = tl.load(at, mask=columns[None, :] < K, other=0.0).to(tl.float32)
    if FACTOR:
        values = values * factor[None, :]
    return values


@triton.jit
def _write(out, rows, values, most, columns, there, K: tl.constexpr):
    # The card's conversion saturates and keeps what is not a number, so nothing is cut here.
    here = there[:, None] & (columns[None, :] < K)
    by = HIGHEST / most
    small = (values * by[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * K + columns[None, :], small, mask=here)


@triton.jit
def _quantise(
    x, out, scales, factor, ends, row_of, by_row, count, E, CHOICES: tl.constexpr, FACTOR: tl.constexpr,
    BY_EXPERT: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """CHOICES > 0: x has tokens, of which row r is that of choice row_of[r]. TAIL < 0: long rows, HEAD at a time.
    Rows past the last are that last one once more, computed and not stored, so that loads have no masks."""
    if BY_EXPERT:
        expert, begin, left = rows_of_block(ends, E, tl.program_id(0), BM, BE)
        if expert >= E:
            return
        factor += expert.to(tl.int64) * K
    else:
        begin = tl.program_id(0) * BM
        left = count - begin
    first = begin.to(tl.int64)
    head = tl.arange(0, HEAD)
    by_head, by_tail, tail = head, head, head
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
    if FACTOR and TAIL >= 0:
        by_head = tl.load(factor + head)
        if TAIL > 0:
            by_tail = tl.load(factor + tail, mask=tail < K, other=0.0)
    for start in tl.range(0, BM, ROWS, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)
        there = i < left
        rows = first + i
        source = first + tl.minimum(i, left - 1)
        if CHOICES > 0:
            source = (tl.load(row_of + source).to(tl.int32) // CHOICES).to(tl.int64)
        source = x + source * by_row
        if TAIL >= 0:
            values = _numbers(source, head, by_head, K, FACTOR, True)
            most = tl.max(tl.abs(values), 1)
            if TAIL > 0:
                rest = _numbers(source, tail, by_tail, K, FACTOR, HEAD + TAIL == K)
                most = tl.maximum(most, tl.max(tl.abs(rest), 1))
            most = tl.maximum(most, LEAST)
            _write(out, rows, values, most, head, there, K)
            if TAIL > 0:
                _write(out, rows, rest, most, tail, there, K)
        else:
            largest = tl.zeros((ROWS, HEAD), tl.float32)
            for c in range(0, K, HEAD):
                by = head
                if FACTOR:
                    by = tl.load(factor + c + head, mask=c + head < K, other=0.0)
                largest = tl.maximum(largest, tl.abs(_numbers(source, c + head, by, K, FACTOR, K % HEAD == 0)))
            most = tl.maximum(tl.max(largest, 1), LEAST)
            for c in range(0, K, HEAD):
                by = head
                if FACTOR:
                    by = tl.load(factor + c + head, mask=c + head < K, other=0.0)
                values = _numbers(source, c + head, by, K, FACTOR, K % HEAD == 0)
                _write(out, rows, values, most, c + head, there, K)
        tl.store(scales + rows, most / HIGHEST, mask=there)


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
        head, tail = _pieces(width)
        experts, walk = (0, PLAIN) if ends is None else (ends.shape[0], BY_EXPERT)
        factor = None if factor is None else factor.contiguous()
        _quantise[(blocks_of(count, experts, walk.rows),)](
            flat, out, scales, factor, ends, row_of, flat.stride(0), count, experts,
            CHOICES=0 if row_of is None else k, FACTOR=factor is not None, BY_EXPERT=ends is not None,
            BE=triton.next_power_of_2(max(1, experts)), K=width, HEAD=head, TAIL=tail,
            BM=walk.rows, ROWS=walk.step, STAGES=walk.stages, num_warps=_warps(walk, head + max(0, tail)),
        )  # fmt: skip
    return out, scales


def _warps(walk: Walk, width: int) -> int:
    threads: int = triton.next_power_of_2(triton.cdiv(walk.step * width, walk.held))
    return min(8, max(2, threads // 32))


def _pieces(width: int) -> tuple[int, int]:
    """Powers of two that together hold a row; (LONG, -1) for one that is read twice."""
    if width > WIDE:
        return LONG, -1
    head = 1 << (width.bit_length() - 1)
    return head, triton.next_power_of_2(width - head) if width > head else 0


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
