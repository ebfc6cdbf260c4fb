"""Row kernels of the expert block for NVIDIA cards: take, activate, its backward, sum. Called by kernels/expert_mlp.py.

Same signatures and results as kernels/expert_reference.py, where they are defined. A program has BM rows of one expert
(as many programs are started as there can be; those with nothing left end at once, so no count is needed on the host)
and walks their columns, so that the low-rank products of those rows come with the one pass over them.

What decides their speed: every load of the loop is issued tiles ahead, and a tile is small enough that three or
four programs share a processor, where one computes while others wait. Rows past an expert's last are that last row
once more, computed and not stored, so that loads have no masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from erniekit.kernels.low_rank import Low
from erniekit.kernels.triton.expert_tiles import (
    Tile,
    blocks_of,
    low_tile,
    narrow_tile,
    padded,
    rows_of_block,
    sizes,
    store_narrow,
    store_wide,
    strides,
    wide_tile,
)
from erniekit.kernels.triton.fast_math import sigmoid

# One stage: of a tile that is a product's operand and stored as well, Triton 3.6 keeps one buffer too few where loads
# are issued ahead, and the next tile overwrites what the tensor cores still read. 1 row in 40,000 had wrong low
# ranks, another one each time (tests/device/test_cuda_experts.py).
TAKE = Tile(128, 128, 8, 1)
LOW = Tile(64, 64, 4, 3)  # where the operand is not what is stored: rows kept in fp8, or not at all
ACTIVATE = Tile(64, 64, 4, 3)
BACKWARD = Tile(64, 64, 4, 3)
SUM = Tile(1, 512, 2, 1)


@triton.jit
def _take(
    x, copy, scales, row_of, ends, out, out_scales, low, L0, L1, E, s0, s1, e0, r0, w0, e1, r1, w1,
    N0: tl.constexpr, N1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, K: tl.constexpr,
    KEEP: tl.constexpr, FP8: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FP8: what is kept are `copy`'s rows, with their scales; low ranks are of x in any case."""
    expert, first, left = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    i = tl.arange(0, BM)
    live = i < left
    choice = tl.load(row_of + first + tl.minimum(i, left - 1)).to(tl.int32)
    token = (choice // K).to(tl.int64)
    first, expert = first.to(tl.int64), expert.to(tl.int64)
    low += first * (N0 + N1)
    if KEEP:
        out += first * W
    if FP8:
        tl.store(out_scales + first + i, tl.load(scales + token), mask=live)
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
        if FP8:
            store_wide(out, i, cols, live, wide_tile(copy, token, cols, W, W, EVEN), W, W, EVEN)
        if P0 > 0 or not FP8:
            tile = wide_tile(x, token, cols, W, W, EVEN)
            if KEEP and not FP8:
                store_wide(out, i, cols, live, tile, W, W, EVEN)
            if P0 > 0:
                a0 = tl.dot(tile, tl.trans(low_tile(L0, i0, cols, r0, w0, N0, P0, W, EVEN)), a0)
            if P1 > 0:
                a1 = tl.dot(tile, tl.trans(low_tile(L1, i1, cols, r1, w1, N1, P1, W, EVEN)), a1)
    if P0 > 0:
        store_narrow(low, i, i0, live, a0 * s0, N0 + N1, N0)
    if P1 > 0:
        store_narrow(low + N0, i, i1, live, a1 * s1, N0 + N1, N1)


def take(
    x: torch.Tensor, row_of: torch.Tensor, k: int, ends: torch.Tensor, lows: list[Low], keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    out = x.new_empty((row_of.shape[0] if keep else 0, x.shape[1]))
    return out, _taken(x, row_of, k, ends, lows, out, keep)


def take_fp8(
    x: torch.Tensor,
    small: tuple[torch.Tensor, torch.Tensor],
    row_of: torch.Tensor,
    k: int,
    ends: torch.Tensor,
    lows: list[Low],
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """fp8 numbers are moved as the bytes they are."""
    x8, scales = small
    out, out_scales = (t.new_empty(row_of.shape[0], t.shape[1]) for t in small)
    low = _taken(x, row_of, k, ends, lows, out.view(torch.uint8), True, x8.view(torch.uint8), scales, out_scales)
    return (out, out_scales), low


def _taken(
    x: torch.Tensor,
    row_of: torch.Tensor,
    k: int,
    ends: torch.Tensor,
    lows: list[Low],
    out: torch.Tensor,
    keep: bool,
    copy: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The low ranks; rows are written to `out`."""
    R, W, E, t = row_of.shape[0], x.shape[1], ends.shape[0], TAKE if keep and copy is None else LOW
    low = x.new_empty(R, sum(factor.shape[1] for factor, _ in lows))
    (L0, s0), (L1, s1) = [*lows, (None, 0.0), (None, 0.0)][:2]
    n0, n1 = (0 if L is None else L.shape[1] for L in (L0, L1))
    _take[(blocks_of(R, E, t.rows),)](
        x, copy, scales, row_of, ends, out, out_scales, low, L0, L1, E, s0, s1, *strides(L0), *strides(L1),
        N0=n0, N1=n1, P0=padded(n0), P1=padded(n1), K=k, KEEP=keep, FP8=copy is not None,
        BE=triton.next_power_of_2(E), **sizes(t, W, max(n0, n1)),
    )  # fmt: skip
    return low


@triton.jit
def _activate(
    gate_up, z, GB, UB, DA, weights, row_of, ends, out, low, E, sg, su, eg, rg, wg, eu, ru, wu, ed, rd, wd,
    NG: tl.constexpr, NU: tl.constexpr, ND: tl.constexpr, PG: tl.constexpr, PU: tl.constexpr, PD: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, left = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    i = tl.arange(0, BM)
    live, rows = i < left, tl.minimum(i, left - 1)
    weight = tl.load(weights + tl.load(row_of + first + rows)).to(tl.float32)
    first, expert = first.to(tl.int64), expert.to(tl.int64)
    gate_up += first * (2 * W)
    out += first * W
    z += first * (NG + NU)
    if PG > 0:
        ig = tl.arange(0, PG)
        zg = narrow_tile(z, rows, ig, NG + NU, NG, PG)
        GB += expert * eg
    if PU > 0:
        iu = tl.arange(0, PU)
        zu = narrow_tile(z + NG, rows, iu, NG + NU, NU, PU)
        UB += expert * eu
    if PD > 0:
        di = tl.arange(0, PD)
        acc = tl.zeros((BM, PD), tl.float32)
        DA += expert * ed
    for c in tl.range(0, W, BN, num_stages=STAGES):
        cols = c + tl.arange(0, BN)
        gate = wide_tile(gate_up, rows, cols, 2 * W, W, EVEN).to(tl.float32)
        up = wide_tile(gate_up + W, rows, cols, 2 * W, W, EVEN).to(tl.float32)
        if PG > 0:
            gate += sg * tl.dot(zg, low_tile(GB, ig, cols, rg, wg, NG, PG, W, EVEN))
        if PU > 0:
            up += su * tl.dot(zu, low_tile(UB, iu, cols, ru, wu, NU, PU, W, EVEN))
        act = (gate * sigmoid(gate) * up * weight[:, None]).to(out.dtype.element_ty)
        store_wide(out, i, cols, live, act, W, W, EVEN)
        if PD > 0:
            acc = tl.dot(act, tl.trans(low_tile(DA, di, cols, rd, wd, ND, PD, W, EVEN)), acc)
    if PD > 0:
        store_narrow(low + first * ND, i, di, live, acc, ND, ND)


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
    ranks = _ranks(GB, UB, DA)
    out, low = gate_up.new_empty(R, twice // 2), gate_up.new_empty(R, ranks["ND"])
    _activate[(blocks_of(R, E, t.rows),)](
        gate_up, z, GB, UB, DA, weights, row_of, ends, out, low, E, sg, su,
        *strides(GB), *strides(UB), *strides(DA), **ranks, BE=triton.next_power_of_2(E),
        **sizes(t, twice // 2, max(ranks.values()), most=4096),
    )  # fmt: skip
    return out, low


def _ranks(*factors: torch.Tensor | None) -> dict[str, int]:
    """Of gate's B, up's B and down's A."""
    ranks = {name: 0 if f is None else f.shape[1] for name, f in zip(("G", "U", "D"), factors)}
    return {f"N{name}": n for name, n in ranks.items()} | {f"P{name}": padded(n) for name, n in ranks.items()}


@triton.jit
def _activate_backward(
    gate_up, z, GB, UB, DA, weights, row_of, ends, grad, grad_low, out, act, grad_weights, grad_z,
    E, sg, su, sd, eg, rg, wg, eu, ru, wu, ed, rd, wd, KEEP: tl.constexpr,
    NG: tl.constexpr, NU: tl.constexpr, ND: tl.constexpr, PG: tl.constexpr, PU: tl.constexpr, PD: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, left = rows_of_block(ends, E, tl.program_id(0), BM, BE)
    if expert >= E:
        return
    i = tl.arange(0, BM)
    live, rows = i < left, tl.minimum(i, left - 1)
    choice = tl.load(row_of + first + rows)
    weight = tl.load(weights + choice).to(tl.float32)
    first, expert = first.to(tl.int64), expert.to(tl.int64)
    gate_up += first * (2 * W)
    out += first * (2 * W)
    grad += first * W
    z += first * (NG + NU)
    grad_z += first * (NG + NU)
    if KEEP:
        act += first * W
    if PG > 0:
        ig = tl.arange(0, PG)
        zg = narrow_tile(z, rows, ig, NG + NU, NG, PG)
        ag = tl.zeros((BM, PG), tl.float32)
        GB += expert * eg
    if PU > 0:
        iu = tl.arange(0, PU)
        zu = narrow_tile(z + NG, rows, iu, NG + NU, NU, PU)
        au = tl.zeros((BM, PU), tl.float32)
        UB += expert * eu
    if PD > 0:
        di = tl.arange(0, PD)
        gl = narrow_tile(grad_low + first * ND, rows, di, ND, ND, PD)
        DA += expert * ed
    dots = tl.zeros((BM,), tl.float32)
    for c in tl.range(0, W, BN, num_stages=STAGES):
        cols = c + tl.arange(0, BN)
        gate = wide_tile(gate_up, rows, cols, 2 * W, W, EVEN).to(tl.float32)
        up = wide_tile(gate_up + W, rows, cols, 2 * W, W, EVEN).to(tl.float32)
        da = wide_tile(grad, rows, cols, W, W, EVEN).to(tl.float32)
        if PG > 0:
            gb = low_tile(GB, ig, cols, rg, wg, NG, PG, W, EVEN)
            gate += sg * tl.dot(zg, gb)
        if PU > 0:
            ub = low_tile(UB, iu, cols, ru, wu, NU, PU, W, EVEN)
            up += su * tl.dot(zu, ub)
        if PD > 0:
            # Without a factor the sum becomes the product's own, and Triton no longer loads `grad` ahead.
            da += sd * tl.dot(gl, low_tile(DA, di, cols, rd, wd, ND, PD, W, EVEN))
        s = sigmoid(gate)
        silu = gate * s
        plain = silu * up
        dots += tl.sum(da * plain, 1)
        if KEEP:
            store_wide(act, i, cols, live, plain * weight[:, None], W, W, EVEN)
        da *= weight[:, None]
        du = (da * silu).to(out.dtype.element_ty)
        store_wide(out + W, i, cols, live, du, 2 * W, W, EVEN)
        dg = (da * up * (s + silu * (1.0 - s))).to(out.dtype.element_ty)
        store_wide(out, i, cols, live, dg, 2 * W, W, EVEN)
        if PG > 0:
            ag = tl.dot(dg, tl.trans(gb), ag)
        if PU > 0:
            au = tl.dot(du, tl.trans(ub), au)
    tl.store(grad_weights + choice, dots.to(grad_weights.dtype.element_ty), mask=live)
    if PG > 0:
        store_narrow(grad_z, i, ig, live, ag * sg, NG + NU, NG)
    if PU > 0:
        store_narrow(grad_z + NG, i, iu, live, au * su, NG + NU, NU)


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
    ranks = _ranks(GB, UB, DA)
    out, act = torch.empty_like(gate_up), gate_up.new_empty((R, twice // 2) if keep else (0, twice // 2))
    grad_weights, grad_z = torch.zeros_like(weights), gate_up.new_empty(R, ranks["NG"] + ranks["NU"])
    _activate_backward[(blocks_of(R, E, t.rows),)](
        gate_up, z, GB, UB, DA, weights, row_of, ends, grad, grad_low, out, act, grad_weights, grad_z,
        E, sg, su, 1.0, *strides(GB), *strides(UB), *strides(DA), KEEP=keep, **ranks,
        BE=triton.next_power_of_2(E), **sizes(t, twice // 2, max(ranks.values()), most=4096),
    )  # fmt: skip
    return out, act, grad_weights, grad_z


@triton.jit
def _sum_choices(rows, place_of, last_end, out, W: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    count = tl.load(last_end)
    for k in tl.static_range(K):
        place = tl.load(place_of + token * K + k).to(tl.int64)
        total += tl.load(rows + place * W + cols, mask=(cols < W) & (place < count), other=0.0).to(tl.float32)
    tl.store(out + token * W + cols, total.to(out.dtype.element_ty), mask=cols < W)


def sum_choices(rows: torch.Tensor, place_of: torch.Tensor, k: int, ends: torch.Tensor) -> torch.Tensor:
    T, W, t = place_of.shape[0] // k, rows.shape[1], SUM
    out = rows.new_empty(T, W)
    _sum_choices[(T, triton.cdiv(W, t.cols))](rows, place_of, ends[-1:], out, W=W, K=k, BN=t.cols, num_warps=t.warps)
    return out
