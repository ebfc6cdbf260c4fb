"""Rows to fp8 with a scale each, and fp8 matrices transposed, for NVIDIA cards. kernels/quantised_rows.py and
kernels/fp8_product.py define both in torch.

A program has ROWS rows: one factor serves all of them, as long as they are one expert's. Up to WIDE numbers a row stays
in registers between finding its largest and dividing by it, in two pieces (2560 is 2048 and 512), so that few lanes
idle; longer rows are read a second time, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE = 8192
LONG = 2048  # numbers of each row at a time beyond that
ROWS = 2
HELD = 96  # numbers a thread holds: with twice as many they do not stay in registers
TILE = 128  # rows and columns that a program transposes
LEAST = tl.constexpr(1e-30)  # as kernels/quantised_rows.py has it
HIGHEST = tl.constexpr(448.0)


@triton.jit
def _numbers(source, factor, expert, one, columns, there, K: tl.constexpr, FACTOR: tl.constexpr, SEVERAL: tl.constexpr):
    """fp32 [ROWS, columns], with their factors in them. one: all rows are the first one's expert's."""
    inside = columns < K
    here = there[:, None] & inside[None, :]
    values = tl.load(source[:, None] + columns[None, :], mask=here, other=0.0).to(tl.float32)
    if FACTOR:
        if SEVERAL:
            if one:
                shared = tl.load(factor + tl.min(expert, 0) * K + columns, mask=inside, other=0.0)
                values = values * shared[None, :]
            else:
                values = values * tl.load(factor + expert[:, None] * K + columns[None, :], mask=here, other=0.0)
        else:
            shared = tl.load(factor + columns, mask=inside, other=0.0)
            values = values * shared[None, :]
    return values


@triton.jit
def _write(out, rows, values, most, columns, there, K: tl.constexpr):
    # The card's conversion saturates and keeps what is not a number, so nothing is cut here.
    inside = columns < K
    here = there[:, None] & inside[None, :]
    by = HIGHEST / most
    small = (values * by[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * K + columns[None, :], small, mask=here)


@triton.jit
def _quantise(
    x, out, scales, factor, ends, row_of, by_row, count, E, CHOICES: tl.constexpr, FACTOR: tl.constexpr,
    BY_EXPERT: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """CHOICES > 0: x has tokens, of which row r is that of choice row_of[r]. TAIL < 0: long rows, HEAD at a time."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    expert = tl.zeros((ROWS,), tl.int64)
    one = tl.min(expert, 0) == 0
    if BY_EXPERT:
        i = tl.arange(0, BE)
        end = tl.load(ends + i, mask=i < E, other=2147483647)
        expert = tl.sum((end[None, :] <= rows[:, None]).to(tl.int64), 1)
        there = there & (expert < E)
        expert = tl.minimum(expert, E - 1)
        one = tl.min(expert, 0) == tl.max(expert, 0)
    source = rows
    if CHOICES > 0:
        source = (tl.load(row_of + rows, mask=there, other=0) // CHOICES).to(tl.int64)
    source = x + source * by_row
    head = tl.arange(0, HEAD)
    if TAIL >= 0:
        values = _numbers(source, factor, expert, one, head, there, K, FACTOR, BY_EXPERT)
        most = tl.max(tl.abs(values), 1)
        if TAIL > 0:
            tail = HEAD + tl.arange(0, TAIL)
            rest = _numbers(source, factor, expert, one, tail, there, K, FACTOR, BY_EXPERT)
            most = tl.maximum(most, tl.max(tl.abs(rest), 1))
        most = tl.maximum(most, LEAST)
        _write(out, rows, values, most, head, there, K)
        if TAIL > 0:
            _write(out, rows, rest, most, tail, there, K)
    else:
        largest = tl.zeros((ROWS, HEAD), tl.float32)
        for start in range(0, K, HEAD):
            values = _numbers(source, factor, expert, one, start + head, there, K, FACTOR, BY_EXPERT)
            largest = tl.maximum(largest, tl.abs(values))
        most = tl.maximum(tl.max(largest, 1), LEAST)
        for start in range(0, K, HEAD):
            values = _numbers(source, factor, expert, one, start + head, there, K, FACTOR, BY_EXPERT)
            _write(out, rows, values, most, start + head, there, K)
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
        experts = 0 if ends is None else ends.shape[0]
        factor = None if factor is None else factor.contiguous()
        _quantise[(triton.cdiv(count, ROWS),)](
            flat, out, scales, factor, ends, row_of, flat.stride(0), count, experts,
            CHOICES=0 if row_of is None else k, FACTOR=factor is not None, BY_EXPERT=ends is not None,
            BE=triton.next_power_of_2(max(1, experts)), K=width, HEAD=head, TAIL=tail, ROWS=ROWS,
            num_warps=min(8, max(2, triton.next_power_of_2(triton.cdiv(ROWS * (head + max(0, tail)), 32 * HELD)))),
        )  # fmt: skip
    return out, scales


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
