"""Products with a low rank in them, expert by expert, for NVIDIA cards. Called by kernels/expert_mlp.py.

Same signatures and results as kernels/expert_reference.py, where they are defined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from erniekit.kernels.low_rank import Tail
from erniekit.kernels.triton.expert_tiles import (
    Tile,
    blocks_of,
    low_tile,
    narrow_tile,
    padded,
    rows_of_block,
    sizes,
    store_wide,
    strides,
    wide_tile,
)

OUTER = Tile(64, 128, 4, 4)
OUTER_OF_TOKENS = Tile(32, 128, 4, 5)  # two stages until a tile is there: first where its rows are
ADD = Tile(64, 128, 4, 3)
WALK = 10  # tiles of columns that a program of add_low walks: it looks up its rows and their low ranks once for all


@triton.jit
def summed_rows(at, rows, left, n, by_row, N: tl.constexpr):
    """[rows, rank] of narrow rows, zeros past the last: those are what keeps other rows out of a sum."""
    where = at + rows[:, None] * by_row + n[None, :]
    return tl.load(where, mask=(rows[:, None] < left) & (n[None, :] < N), other=0.0)


@triton.jit
def store_outer(at, cols, n, by_n, by_w, tile, N: tl.constexpr, W: tl.constexpr):
    mask = (cols[:, None] < W) & (n[None, :] < N)
    tl.store(at + cols[:, None] * by_w + n[None, :] * by_n, tile.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _outer(
    wide, row_of, ends, Z0, Z1, out0, out1, by_row, m0, m1, s0, s1, e0, r0, w0, e1, r1, w1,
    N0: tl.constexpr, N1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = tl.load(ends + expert) - first
    if K > 0:
        row_of += first
    else:
        wide += first.to(tl.int64) * by_row
    Z0 += first.to(tl.int64) * m0
    i0 = tl.arange(0, P0)
    a0 = tl.zeros((BN, P0), tl.float32)
    if P1 > 0:
        Z1 += first.to(tl.int64) * m1
        i1 = tl.arange(0, P1)
        a1 = tl.zeros((BN, P1), tl.float32)
    for start in tl.range(0, count, BM, num_stages=STAGES):
        rows = start + tl.arange(0, BM)
        there = tl.minimum(rows, count - 1)
        if K > 0:
            there = tl.load(row_of + there).to(tl.int32) // K
        tile = tl.trans(wide_tile(wide, there.to(tl.int64), cols, by_row, W, EVEN))
        a0 = tl.dot(tile, summed_rows(Z0, rows, count, i0, m0, N0), a0)
        if P1 > 0:
            a1 = tl.dot(tile, summed_rows(Z1, rows, count, i1, m1, N1), a1)
    expert = expert.to(tl.int64)
    store_outer(out0 + expert * e0, cols, i0, r0, w0, a0 * s0, N0, W)
    if P1 > 0:
        store_outer(out1 + expert * e1, cols, i1, r1, w1, a1 * s1, N1, W)


def outer(
    wide: torch.Tensor,
    narrows: list[tuple[torch.Tensor, float]],
    ends: torch.Tensor,
    row_of: torch.Tensor | None = None,
    k: int = 0,
    turned: bool = False,
) -> list[torch.Tensor]:
    W, E, t = wide.shape[1], ends.shape[0], OUTER if row_of is None else OUTER_OF_TOKENS
    ranks = [narrow.shape[1] for narrow, _ in narrows]
    outs = [wide.new_empty((E, W, n) if turned else (E, n, W)) for n in ranks]
    (Z0, s0), (Z1, s1) = [*narrows, (None, 0.0)][:2]
    n0, n1 = [*ranks, 0][:2]
    out0, out1 = [*(o.transpose(1, 2) if turned else o for o in outs), None][:2]
    m0, m1 = [*(narrow.stride(0) for narrow, _ in narrows), 0][:2]
    tile = sizes(t, W, max(ranks))
    _outer[(triton.cdiv(W, tile["BN"]), E)](
        wide, row_of, ends, Z0, Z1, out0, out1, wide.stride(0), m0, m1, s0, s1, *strides(out0), *strides(out1),
        N0=n0, N1=n1, P0=padded(n0), P1=padded(n1), K=k if row_of is not None else 0, **tile,
    )  # fmt: skip
    return outs


@triton.jit
def _outer_of_halves(
    wide, narrow, ends, out0, out1, s0, s1,
    N0: tl.constexpr, N1: tl.constexpr, P: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    tiles: tl.constexpr = (W + BN - 1) // BN
    half = tl.program_id(0) // tiles
    cols = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = tl.load(ends + expert) - first
    wide += first.to(tl.int64) * (2 * W) + half * W
    narrow += first.to(tl.int64) * (N0 + N1) + half * N0
    rank = tl.where(half == 0, N0, N1)
    n = tl.arange(0, P)
    acc = tl.zeros((BN, P), tl.float32)
    for start in tl.range(0, count, BM, num_stages=STAGES):
        rows = start + tl.arange(0, BM)
        there = tl.minimum(rows, count - 1).to(tl.int64)
        where = narrow + rows[:, None] * (N0 + N1) + n[None, :]
        if N0 == P and N1 == P:
            z = tl.load(where, mask=rows[:, None] < count, other=0.0)
        else:
            z = tl.load(where, mask=(rows[:, None] < count) & (n[None, :] < rank), other=0.0)
        acc = tl.dot(tl.trans(wide_tile(wide, there, cols, 2 * W, W, EVEN)), z, acc)
    expert = expert.to(tl.int64)
    if half == 0:
        store_outer(out0 + expert * (W * N0), cols, n, 1, N0, acc * s0, N0, W)
    else:
        store_outer(out1 + expert * (W * N1), cols, n, 1, N1, acc * s1, N1, W)


def outer_of_halves(
    wide: torch.Tensor, narrow: torch.Tensor, split: int, scales: tuple[float, float], ends: torch.Tensor
) -> list[torch.Tensor]:
    W, E, ranks = wide.shape[1] // 2, ends.shape[0], (split, narrow.shape[1] - split)
    outs = [wide.new_empty(E, W, n) for n in ranks]
    tile = sizes(OUTER, W, max(ranks))
    _outer_of_halves[(2 * triton.cdiv(W, tile["BN"]), E)](
        wide, narrow, ends, *outs, *scales, N0=ranks[0], N1=ranks[1], P=padded(max(ranks)), **tile
    )
    return outs


@triton.jit
def _add_low(
    out, ends, Z0, Z1, L0, L1, E, m0, m1, e0, r0, w0, e1, r1, w1, scale,
    N0: tl.constexpr, N1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, WALK: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, left = rows_of_block(ends, E, tl.program_id(1), BM, BE)
    if expert >= E:
        return
    i = tl.arange(0, BM)
    live, rows = i < left, tl.minimum(i, left - 1)
    first, expert = first.to(tl.int64), expert.to(tl.int64)
    out += first * W
    i0 = tl.arange(0, P0)
    z0 = narrow_tile(Z0 + first * m0, rows, i0, m0, N0, P0)
    L0 += expert * e0
    if P1 > 0:
        i1 = tl.arange(0, P1)
        z1 = narrow_tile(Z1 + first * m1, rows, i1, m1, N1, P1)
        L1 += expert * e1
    begin = tl.program_id(0) * (WALK * BN)
    for c in tl.range(begin, tl.minimum(begin + WALK * BN, W), BN, num_stages=STAGES):
        cols = c + tl.arange(0, BN)
        value = wide_tile(out, rows, cols, W, W, EVEN).to(tl.float32)
        total = tl.dot(z0, low_tile(L0, i0, cols, r0, w0, N0, P0, W, EVEN))
        if P1 > 0:
            total = tl.dot(z1, low_tile(L1, i1, cols, r1, w1, N1, P1, W, EVEN), total)
        store_wide(out, i, cols, live, value + scale * total, W, W, EVEN)


def add_low(out: torch.Tensor, tails: list[Tail], scale: float, ends: torch.Tensor) -> torch.Tensor:
    if not tails:
        return out
    (R, W), E, t = out.shape, ends.shape[0], ADD
    (Z0, L0), (Z1, L1) = [*tails, (None, None)][:2]
    n0, n1 = (0 if Z is None else Z.shape[1] for Z in (Z0, Z1))
    m0, m1 = (0 if Z is None else Z.stride(0) for Z in (Z0, Z1))
    tile = sizes(t, W, max(n0, n1))
    _add_low[(triton.cdiv(W, WALK * tile["BN"]), blocks_of(R, E, t.rows))](
        out, ends, Z0, Z1, L0, L1, E, m0, m1, *strides(L0), *strides(L1), scale,
        N0=n0, N1=n1, P0=padded(n0), P1=padded(n1), WALK=WALK, BE=triton.next_power_of_2(E), **tile,
    )  # fmt: skip
    return out
