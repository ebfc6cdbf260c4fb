"""Row kernels of the expert block for NVIDIA cards: take, activate, its backward, sum. Called by kernels/expert_mlp.py.

Same signatures and results as kernels/expert_mlp_rows.py, where they are defined. A program has BM rows of one expert
(as many programs are started as there can be; those with nothing left end at once, so no count is needed on the host)
and walks their columns, so that the low-rank products of those rows come with the one pass over them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

Low = tuple[torch.Tensor, float]  # a low-rank factor [E, rank, width], any strides, and what its product is scaled by


class Tile(NamedTuple):
    rows: int
    cols: int
    warps: int
    stages: int


TAKE = Tile(64, 128, 4, 2)
ACTIVATE = Tile(64, 64, 4, 3)
BACKWARD = Tile(64, 64, 4, 2)
SUM = Tile(1, 512, 2, 1)


def padded(rank: int) -> int:
    """What a tensor core's product can be given: a power of two, 16 at least."""
    return max(16, triton.next_power_of_2(rank))


def blocks_of(rows: int, experts: int, each: int) -> int:
    """Most blocks of `each` rows that rows of so many experts can make."""
    return triton.cdiv(rows, each) + experts


@triton.jit
def rows_of_block(ends, E, block, BM: tl.constexpr, BE: tl.constexpr):
    """(expert, first row, one past the expert's last row) of a block; expert >= E: there are no more rows."""
    i = tl.arange(0, BE)
    end = tl.load(ends + i, mask=i < E, other=0)
    start = tl.load(ends + i - 1, mask=(i > 0) & (i < E), other=0)
    blocks = tl.where(i < E, (end - start + BM - 1) // BM, 0)
    upto = tl.cumsum(blocks, 0)
    expert = tl.sum((upto <= block).to(tl.int32), 0)
    before = tl.sum(tl.where(i < expert, blocks, 0), 0)
    first = tl.sum(tl.where(i == expert, start, 0), 0) + (block - before) * BM
    last = tl.sum(tl.where(i == expert, end, 0), 0)
    return expert, first, last


@triton.jit
def low_tile(at, expert, n, cols, N, W, by_e, by_n, by_w, BN: tl.constexpr):
    """[rank, columns] of a factor [E, rank, width]."""
    where = at + expert.to(tl.int64) * by_e + n[:, None] * by_n + cols[None, :] * by_w
    return tl.load(where, mask=(n[:, None] < N) & (cols[None, :] < W), other=0.0)


@triton.jit
def _take(
    x, row_of, ends, out, low, L0, L1, E, n0, n1, s0, s1, e0, r0, w0, e1, r1, w1,
    W: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    expert, first, last = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    rows = first + tl.arange(0, BM)
    live = rows < last
    token = tl.load(row_of + rows, mask=live, other=0).to(tl.int64) // K
    rows = rows.to(tl.int64)
    if P0 > 0:
        a0 = tl.zeros((BM, P0), tl.float32)
        i0 = tl.arange(0, P0)
    if P1 > 0:
        a1 = tl.zeros((BM, P1), tl.float32)
        i1 = tl.arange(0, P1)
    for c in range(0, W, BN):
        cols = c + tl.arange(0, BN)
        mask = live[:, None] & (cols[None, :] < W)
        tile = tl.load(x + token[:, None] * W + cols[None, :], mask=mask, other=0.0)
        if KEEP:
            tl.store(out + rows[:, None] * W + cols[None, :], tile, mask=mask)
        if P0 > 0:
            a0 = tl.dot(tile, tl.trans(low_tile(L0, expert, i0, cols, n0, W, e0, r0, w0, BN)), a0)
        if P1 > 0:
            a1 = tl.dot(tile, tl.trans(low_tile(L1, expert, i1, cols, n1, W, e1, r1, w1, BN)), a1)
    if P0 > 0:
        to = low + rows[:, None] * (n0 + n1) + i0[None, :]
        tl.store(to, (a0 * s0).to(low.dtype.element_ty), mask=live[:, None] & (i0[None, :] < n0))
    if P1 > 0:
        to = low + rows[:, None] * (n0 + n1) + n0 + i1[None, :]
        tl.store(to, (a1 * s1).to(low.dtype.element_ty), mask=live[:, None] & (i1[None, :] < n1))


def take(
    x: torch.Tensor, row_of: torch.Tensor, k: int, ends: torch.Tensor, lows: list[Low], keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    R, W, E = row_of.shape[0], x.shape[1], ends.shape[0]
    out = x.new_empty((R, W) if keep else (0, W))
    low = x.new_empty(R, sum(factor.shape[1] for factor, _ in lows))
    (L0, s0), (L1, s1) = [*lows, (None, 0.0), (None, 0.0)][:2]
    n0, n1 = (0 if L is None else L.shape[1] for L in (L0, L1))
    t = TAKE
    _take[(blocks_of(R, E, t.rows),)](
        x, row_of, ends, out, low, L0, L1, E, n0, n1, s0, s1, *strides(L0), *strides(L1),
        W=W, K=k, KEEP=keep, P0=padded(n0) if n0 else 0, P1=padded(n1) if n1 else 0,
        BM=t.rows, BN=t.cols, BE=triton.next_power_of_2(E), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out, low


def strides(factor: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if factor is None else factor.stride()


@triton.jit
def _activate(
    gate_up, z, GB, UB, DA, weights, row_of, ends, out, low, E, ng, nu, nd, sg, su,
    eg, rg, wg, eu, ru, wu, ed, rd, wd,
    W: tl.constexpr, PG: tl.constexpr, PU: tl.constexpr, PD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    expert, first, last = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    rows = first + tl.arange(0, BM)
    live = rows < last
    weight = tl.load(weights + tl.load(row_of + rows, mask=live, other=0), mask=live, other=0.0).to(tl.float32)
    rows = rows.to(tl.int64)
    if PG > 0:
        ig = tl.arange(0, PG)
        zg = tl.load(z + rows[:, None] * (ng + nu) + ig[None, :], mask=live[:, None] & (ig[None, :] < ng), other=0.0)
    if PU > 0:
        iu = tl.arange(0, PU)
        zu = tl.load(
            z + rows[:, None] * (ng + nu) + ng + iu[None, :], mask=live[:, None] & (iu[None, :] < nu), other=0.0
        )
    if PD > 0:
        di = tl.arange(0, PD)
        acc = tl.zeros((BM, PD), tl.float32)
    for c in range(0, W, BN):
        cols = c + tl.arange(0, BN)
        mask = live[:, None] & (cols[None, :] < W)
        at = gate_up + rows[:, None] * (2 * W) + cols[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + W, mask=mask, other=0.0).to(tl.float32)
        if PG > 0:
            gate += sg * tl.dot(zg, low_tile(GB, expert, ig, cols, ng, W, eg, rg, wg, BN))
        if PU > 0:
            up += su * tl.dot(zu, low_tile(UB, expert, iu, cols, nu, W, eu, ru, wu, BN))
        act = (gate * tl.sigmoid(gate) * up * weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * W + cols[None, :], act, mask=mask)
        if PD > 0:
            acc = tl.dot(act, tl.trans(low_tile(DA, expert, di, cols, nd, W, ed, rd, wd, BN)), acc)
    if PD > 0:
        to = low + rows[:, None] * nd + di[None, :]
        tl.store(to, acc.to(low.dtype.element_ty), mask=live[:, None] & (di[None, :] < nd))


def activate(
    gate_up: torch.Tensor,
    z: torch.Tensor,
    gate: Low | None,
    up: Low | None,
    down: Low | None,
    weights: torch.Tensor,
    row_of: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    (R, twice), E, t = gate_up.shape, ends.shape[0], ACTIVATE
    (GB, sg), (UB, su), (DA, _) = (low or (None, 0.0) for low in (gate, up, down))
    ng, nu, nd = (0 if f is None else f.shape[1] for f in (GB, UB, DA))
    out, low = gate_up.new_empty(R, twice // 2), gate_up.new_empty(R, nd)
    _activate[(blocks_of(R, E, t.rows),)](
        gate_up, z, GB, UB, DA, weights, row_of, ends, out, low, E, ng, nu, nd, sg, su,
        *strides(GB), *strides(UB), *strides(DA), W=twice // 2, **sizes(ng, nu, nd, E, t),
    )  # fmt: skip
    return out, low


def sizes(ng: int, nu: int, nd: int, experts: int, t: Tile) -> dict[str, int]:
    ranks = {name: padded(n) if n else 0 for name, n in (("PG", ng), ("PU", nu), ("PD", nd))}
    tile = {"BM": t.rows, "BN": t.cols, "num_warps": t.warps, "num_stages": t.stages}
    return {**ranks, **tile, "BE": triton.next_power_of_2(experts)}


@triton.jit
def _activate_backward(
    gate_up, z, GB, UB, DA, weights, row_of, ends, grad, grad_low, out, act, grad_weights, grad_z,
    E, ng, nu, nd, sg, su, eg, rg, wg, eu, ru, wu, ed, rd, wd,
    W: tl.constexpr, KEEP: tl.constexpr, PG: tl.constexpr, PU: tl.constexpr, PD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    expert, first, last = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    rows = first + tl.arange(0, BM)
    live = rows < last
    choice = tl.load(row_of + rows, mask=live, other=0)
    weight = tl.load(weights + choice, mask=live, other=0.0).to(tl.float32)
    rows = rows.to(tl.int64)
    if PG > 0:
        ig = tl.arange(0, PG)
        zg = tl.load(z + rows[:, None] * (ng + nu) + ig[None, :], mask=live[:, None] & (ig[None, :] < ng), other=0.0)
        ag = tl.zeros((BM, PG), tl.float32)
    if PU > 0:
        iu = tl.arange(0, PU)
        zu = tl.load(
            z + rows[:, None] * (ng + nu) + ng + iu[None, :], mask=live[:, None] & (iu[None, :] < nu), other=0.0
        )
        au = tl.zeros((BM, PU), tl.float32)
    if PD > 0:
        di = tl.arange(0, PD)
        gl = tl.load(grad_low + rows[:, None] * nd + di[None, :], mask=live[:, None] & (di[None, :] < nd), other=0.0)
    dots = tl.zeros((BM,), tl.float32)
    for c in range(0, W, BN):
        cols = c + tl.arange(0, BN)
        mask = live[:, None] & (cols[None, :] < W)
        at = rows[:, None] * (2 * W) + cols[None, :]
        gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at + W, mask=mask, other=0.0).to(tl.float32)
        da = tl.load(grad + rows[:, None] * W + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if PG > 0:
            gb = low_tile(GB, expert, ig, cols, ng, W, eg, rg, wg, BN)
            gate += sg * tl.dot(zg, gb)
        if PU > 0:
            ub = low_tile(UB, expert, iu, cols, nu, W, eu, ru, wu, BN)
            up += su * tl.dot(zu, ub)
        if PD > 0:
            da += tl.dot(gl, low_tile(DA, expert, di, cols, nd, W, ed, rd, wd, BN))
        s = tl.sigmoid(gate)
        silu = gate * s
        plain = silu * up
        dots += tl.sum(da * plain, 1)
        da *= weight[:, None]
        dg = (da * up * (s + silu * (1.0 - s))).to(out.dtype.element_ty)
        du = (da * silu).to(out.dtype.element_ty)
        tl.store(out + at, dg, mask=mask)
        tl.store(out + at + W, du, mask=mask)
        if KEEP:
            value = (plain * weight[:, None]).to(act.dtype.element_ty)
            tl.store(act + rows[:, None] * W + cols[None, :], value, mask=mask)
        if PG > 0:
            ag = tl.dot(dg, tl.trans(gb), ag)
        if PU > 0:
            au = tl.dot(du, tl.trans(ub), au)
    tl.store(grad_weights + choice, dots.to(grad_weights.dtype.element_ty), mask=live)
    if PG > 0:
        to = grad_z + rows[:, None] * (ng + nu) + ig[None, :]
        tl.store(to, (ag * sg).to(grad_z.dtype.element_ty), mask=live[:, None] & (ig[None, :] < ng))
    if PU > 0:
        to = grad_z + rows[:, None] * (ng + nu) + ng + iu[None, :]
        tl.store(to, (au * su).to(grad_z.dtype.element_ty), mask=live[:, None] & (iu[None, :] < nu))


def activate_backward(
    grad: torch.Tensor,
    grad_low: torch.Tensor,
    gate_up: torch.Tensor,
    z: torch.Tensor,
    gate: Low | None,
    up: Low | None,
    down: Low | None,
    weights: torch.Tensor,
    row_of: torch.Tensor,
    ends: torch.Tensor,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (R, twice), E, t = gate_up.shape, ends.shape[0], BACKWARD
    (GB, sg), (UB, su), (DA, _) = (low or (None, 0.0) for low in (gate, up, down))
    ng, nu, nd = (0 if f is None else f.shape[1] for f in (GB, UB, DA))
    out, act = torch.empty_like(gate_up), gate_up.new_empty((R, twice // 2) if keep else (0, twice // 2))
    grad_weights, grad_z = torch.empty_like(weights), gate_up.new_empty(R, ng + nu)
    _activate_backward[(blocks_of(R, E, t.rows),)](
        gate_up, z, GB, UB, DA, weights, row_of, ends, grad, grad_low, out, act, grad_weights, grad_z,
        E, ng, nu, nd, sg, su, *strides(GB), *strides(UB), *strides(DA),
        W=twice // 2, KEEP=keep, **sizes(ng, nu, nd, E, t),
    )  # fmt: skip
    return out, act, grad_weights, grad_z


@triton.jit
def _sum_choices(rows, place_of, out, W: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(place_of + token * K + k).to(tl.int64)
        total += tl.load(rows + place * W + cols, mask=cols < W, other=0.0).to(tl.float32)
    tl.store(out + token * W + cols, total.to(out.dtype.element_ty), mask=cols < W)


def sum_choices(rows: torch.Tensor, place_of: torch.Tensor, k: int) -> torch.Tensor:
    T, W, t = place_of.shape[0] // k, rows.shape[1], SUM
    out = rows.new_empty(T, W)
    _sum_choices[(T, triton.cdiv(W, t.cols))](rows, place_of, out, W=W, K=k, BN=t.cols, num_warps=t.warps)
    return out
