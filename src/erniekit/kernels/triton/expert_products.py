"""Products with a low rank in them, expert by expert, for NVIDIA cards. Called by kernels/expert_mlp.py.

Same signatures and results as kernels/expert_mlp_rows.py, where they are defined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from erniekit.kernels.triton.expert_rows import Tile, blocks_of, low_tile, padded, rows_of_block, strides

Tail = tuple[torch.Tensor, torch.Tensor]  # narrow rows [R, n] and their factor [E, n, width]

OUTER = Tile(64, 128, 4, 4)
ADD = Tile(64, 128, 4, 2)
PRODUCT = Tile(128, 256, 8, 4)
DEPTH = 64  # of one step of the product


@triton.jit
def narrow_tile(at, rows, live, n, N, by_row):
    """[rows, rank] of narrow rows [R, rank]."""
    return tl.load(at + rows[:, None] * by_row + n[None, :], mask=live[:, None] & (n[None, :] < N), other=0.0)


@triton.jit
def _outer(
    wide, row_of, ends, N0, N1, out0, out1, by_row, n0, n1, m0, m1, s0, s1, e0, r0, w0, e1, r1, w1,
    W: tl.constexpr, K: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    i0 = tl.arange(0, P0)
    a0 = tl.zeros((BN, P0), tl.float32)
    if P1 > 0:
        i1 = tl.arange(0, P1)
        a1 = tl.zeros((BN, P1), tl.float32)
    for start in range(first, last, BM):
        rows = start + tl.arange(0, BM)
        live = rows < last
        if K > 0:
            there = tl.load(row_of + rows, mask=live, other=0).to(tl.int64) // K
        else:
            there = rows.to(tl.int64)
        rows = rows.to(tl.int64)
        tile = tl.load(
            wide + there[:, None] * by_row + cols[None, :], mask=live[:, None] & (cols[None, :] < W), other=0.0
        )
        a0 = tl.dot(tl.trans(tile), narrow_tile(N0, rows, live, i0, n0, m0), a0)
        if P1 > 0:
            a1 = tl.dot(tl.trans(tile), narrow_tile(N1, rows, live, i1, n1, m1), a1)
    expert = expert.to(tl.int64)
    to = out0 + expert * e0 + cols[:, None] * w0 + i0[None, :] * r0
    tl.store(to, (a0 * s0).to(out0.dtype.element_ty), mask=(cols[:, None] < W) & (i0[None, :] < n0))
    if P1 > 0:
        to = out1 + expert * e1 + cols[:, None] * w1 + i1[None, :] * r1
        tl.store(to, (a1 * s1).to(out1.dtype.element_ty), mask=(cols[:, None] < W) & (i1[None, :] < n1))


def outer(
    wide: torch.Tensor,
    narrows: list[tuple[torch.Tensor, float]],
    ends: torch.Tensor,
    row_of: torch.Tensor | None = None,
    k: int = 0,
    turned: bool = False,
) -> list[torch.Tensor]:
    W, E, t = wide.shape[1], ends.shape[0], OUTER
    ranks = [narrow.shape[1] for narrow, _ in narrows]
    outs = [wide.new_empty((E, W, n) if turned else (E, n, W)) for n in ranks]
    (N0, s0), (N1, s1) = [*narrows, (None, 0.0)][:2]
    n0, n1 = [*ranks, 0][:2]
    out0, out1 = [*(o.transpose(1, 2) if turned else o for o in outs), None][:2]
    m0, m1 = [*(narrow.stride(0) for narrow, _ in narrows), 0][:2]
    _outer[(triton.cdiv(W, t.cols), E)](
        wide, row_of, ends, N0, N1, out0, out1, wide.stride(0), n0, n1, m0, m1, s0, s1, *strides(out0),
        *strides(out1), W=W, K=k if row_of is not None else 0, P0=padded(n0), P1=padded(n1) if n1 else 0,
        BM=t.rows, BN=t.cols, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return outs


@triton.jit
def _add_low(
    out, ends, Z0, Z1, L0, L1, E, n0, n1, m0, m1, e0, r0, w0, e1, r1, w1, scale,
    W: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    expert, first, last = rows_of_block(ends, E, tl.program_id(1), BM, BE)
    if expert >= E:
        return
    rows = first + tl.arange(0, BM)
    live = rows < last
    rows = rows.to(tl.int64)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    at = out + rows[:, None] * W + cols[None, :]
    mask = live[:, None] & (cols[None, :] < W)
    i0 = tl.arange(0, P0)
    low = low_tile(L0, expert, i0, cols, n0, W, e0, r0, w0, BN)
    total = tl.dot(narrow_tile(Z0, rows, live, i0, n0, m0), low)
    if P1 > 0:
        i1 = tl.arange(0, P1)
        low = low_tile(L1, expert, i1, cols, n1, W, e1, r1, w1, BN)
        total = tl.dot(narrow_tile(Z1, rows, live, i1, n1, m1), low, total)
    total = total * scale + tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def add_low(out: torch.Tensor, tails: list[Tail], scale: float, ends: torch.Tensor) -> torch.Tensor:
    if not tails:
        return out
    (R, W), E, t = out.shape, ends.shape[0], ADD
    args, ranks = _flat(tails)
    _add_low[(triton.cdiv(W, t.cols), blocks_of(R, E, t.rows))](
        out, ends, *args[:4], E, *args[4:], scale, **ranks, W=W,
        BM=t.rows, BN=t.cols, BE=triton.next_power_of_2(E), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def _flat(tails: list[Tail]) -> tuple[list[object], dict[str, int]]:
    """Pointers of the narrow rows and factors, then ranks, row strides and the factors' strides; for two."""
    (Z0, L0), (Z1, L1) = [*tails, (None, None), (None, None)][:2]
    n0, n1 = (0 if Z is None else Z.shape[1] for Z in (Z0, Z1))
    m0, m1 = (0 if Z is None else Z.stride(0) for Z in (Z0, Z1))
    ranks = {"P0": padded(n0) if n0 else 0, "P1": padded(n1) if n1 else 0}
    return [Z0, Z1, L0, L1, n0, n1, m0, m1, *strides(L0), *strides(L1)], ranks


@triton.jit
def _product(
    x, weight, row_of, ends, out, Z0, Z1, L0, L1, E, by_row, by_e, by_d, by_w,
    n0, n1, m0, m1, e0, r0, w0, e1, r1, w1, scale,
    D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(W, BN)
    expert, first, last = rows_of_block(ends, E, tl.program_id(0) // across, BM, BE)
    if expert >= E:
        return
    rows = first + tl.arange(0, BM)
    live = rows < last
    cols = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    kept = tl.minimum(rows, last - 1)  # what lies past the end is computed with some row and thrown away
    if K > 0:
        there = tl.load(row_of + kept).to(tl.int64) // K
    else:
        there = kept.to(tl.int64)
    rows = rows.to(tl.int64)
    expert = expert.to(tl.int64)
    depth = tl.arange(0, BD)
    acc = tl.zeros((BM, BN), tl.float32)
    if P0 > 0:
        i0 = tl.arange(0, P0)
        low = low_tile(L0, expert, i0, cols, n0, W, e0, r0, w0, BN)
        acc = tl.dot(narrow_tile(Z0, rows, live, i0, n0, m0), low, acc)
    if P1 > 0:
        i1 = tl.arange(0, P1)
        low = low_tile(L1, expert, i1, cols, n1, W, e1, r1, w1, BN)
        acc = tl.dot(narrow_tile(Z1, rows, live, i1, n1, m1), low, acc)
    if P0 > 0:
        acc *= scale
    a_at = x + there[:, None] * by_row + depth[None, :]
    inside = cols % W
    b_at = weight + expert * by_e + depth[:, None].to(tl.int64) * by_d + inside[None, :].to(tl.int64) * by_w
    for d in range(0, D, BD):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=depth[None, :] < D - d, other=0.0)
            b = tl.load(b_at, mask=depth[:, None] < D - d, other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BD
        b_at += BD * by_d
    to = out + rows[:, None] * W + cols[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (cols[None, :] < W))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    tails: list[Tail],
    scale: float = 1.0,
    row_of: torch.Tensor | None = None,
    k: int = 0,
) -> torch.Tensor:
    E, D, W = weight.shape
    R, t = (x if row_of is None else row_of).shape[0], PRODUCT
    out = x.new_empty(R, W)
    args, ranks = _flat(tails)
    _product[(blocks_of(R, E, t.rows) * triton.cdiv(W, t.cols),)](
        x, weight, row_of, ends, out, *args[:4], E, x.stride(0), *weight.stride(), *args[4:], scale, **ranks, D=D, W=W,
        K=k if row_of is not None else 0, EVEN=D % DEPTH == 0, BM=t.rows, BN=t.cols, BD=DEPTH,
        BE=triton.next_power_of_2(E), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out
