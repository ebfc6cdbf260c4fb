"""What the kernels of the expert block share: tiles of rows, columns and low ranks. Used by expert_rows.py and
expert_products.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    rows: int  # 16 a warp: with fewer, warps compute the same twice
    cols: int
    warps: int
    stages: int  # tiles of the loop that are on their way at a time
    registers: int | None = None  # most of a thread: fewer let more programs share a processor


def padded(rank: int) -> int:
    """What a tensor core's product can be given: a power of two, 16 at least; 0: there is none."""
    return max(16, triton.next_power_of_2(rank)) if rank else 0


def blocks_of(rows: int, experts: int, each: int) -> int:
    """Most blocks of `each` rows that rows of so many experts can make."""
    result: int = triton.cdiv(rows, each) + experts
    return result


def strides(factor: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if factor is None else factor.stride()


def sizes(t: Tile, width: int, rank: int, most: int = 8192) -> dict[str, Any]:
    """The arguments of every kernel on its tile and the columns it walks. Tiles are chosen for ranks up to 32; higher
    ones need the registers, and the memory of stages; `most` is what a tile's columns times the rank may be then."""
    if rank > 32:
        t = Tile(t.rows, min(t.cols, most // padded(rank)), t.warps, min(t.stages, 2))
    tile = {"BM": t.rows, "BN": t.cols, "STAGES": t.stages, "num_warps": t.warps, "maxnreg": t.registers}
    return {"W": width, "EVEN": width % t.cols == 0, **tile}


@triton.jit
def rows_of_block(ends, E, block, BM: tl.constexpr, BE: tl.constexpr):
    """(expert, first row, how many from there on) of a block; expert >= E: there are no more rows."""
    i = tl.arange(0, BE)
    end = tl.load(ends + i, mask=i < E, other=0)
    start = tl.load(ends + i - 1, mask=(i > 0) & (i < E), other=0)
    upto = tl.cumsum(tl.where(i < E, (end - start + BM - 1) // BM, 0), 0)
    expert = tl.sum((upto <= block).to(tl.int32), 0)
    before = tl.max(tl.where(upto <= block, upto, 0), 0)
    first = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < E), other=0) + (block - before) * BM
    return expert, first, tl.load(ends + expert, mask=expert < E, other=0) - first


@triton.jit
def low_tile(at, n, cols, by_n, by_w, N: tl.constexpr, P: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr):
    """[rank, columns] of an expert's factor [rank, width]."""
    where = at + n[:, None] * by_n + cols[None, :] * by_w
    if EVEN and N == P:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=(n[:, None] < N) & (cols[None, :] < W), other=0.0)
    return tile


@triton.jit
def narrow_tile(at, rows, n, by_row, N: tl.constexpr, P: tl.constexpr):
    """[rows, rank] of narrow rows."""
    where = at + rows[:, None] * by_row + n[None, :]
    if N == P:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=n[None, :] < N, other=0.0)
    return tile


@triton.jit
def wide_tile(at, rows, cols, by_row, W: tl.constexpr, EVEN: tl.constexpr):
    """[rows, columns] of wide rows."""
    where = at + rows[:, None] * by_row + cols[None, :]
    if EVEN:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=cols[None, :] < W, other=0.0)
    return tile


@triton.jit
def store_wide(at, i, cols, live, tile, by_row, W: tl.constexpr, EVEN: tl.constexpr):
    where = at + i[:, None] * by_row + cols[None, :]
    mask = live[:, None] if EVEN else live[:, None] & (cols[None, :] < W)
    tl.store(where, tile.to(at.dtype.element_ty), mask=mask)


@triton.jit
def store_narrow(at, i, n, live, tile, by_row, N: tl.constexpr):
    mask = live[:, None] & (n[None, :] < N)
    tl.store(at + i[:, None] * by_row + n[None, :], tile.to(at.dtype.element_ty), mask=mask)
