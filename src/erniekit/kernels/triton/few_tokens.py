"""A mixture of experts over the few tokens of a server's step, in five launches: logits, choices, order, gate and up
with SwiGLU, down. Called by kernels/few_tokens.py; router_logits.py, models/layers/router.py, moe_permute.py and
expert_mlp.py define what is computed.

Such a step reads the weights of the experts that were chosen, and that is its time: products have tiles of 16 rows, and
what the tiles of a large product would pad to is not computed. R rows, one of each choice; E experts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from erniekit.kernels.triton.expert_tiles import blocks_of, rows_of_block
from erniekit.kernels.triton.fast_math import sigmoid


class FewRowsTile(NamedTuple):
    cols: int
    depth: int  # of what is summed over, at a time
    warps: int
    stages: int


# Of eight that were tried on an H200 for 1 to 160 tokens the fastest, or within 3 % of it.
PRODUCT = FewRowsTile(64, 128, 4, 3)
SMALL, ROOM = FewRowsTile(64, 64, 4, 3), 96 << 10  # for processors with less shared memory than so many bytes
EXPERTS_A_PROGRAM, DEPTH = 2, 4096  # of the router's product
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _logits(x, weight, out, E, H: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr):
    token, e, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE + tl.arange(0, BE), tl.arange(0, BK)
    acc = tl.zeros((BE, BK), tl.float32)
    for start in range(0, H, BK):
        inside = start + k < H
        row = tl.load(x + token * H + start + k, mask=inside, other=0.0).to(tl.float32)
        at = weight + e[:, None] * H + start + k[None, :]
        acc += tl.load(at, mask=(e < E)[:, None] & inside[None, :], other=0.0) * row[None, :]
    tl.store(out + token * E + e, tl.sum(acc, 1), mask=e < E)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H], weight fp32 [E, H] -> fp32 [T, E]."""
    (T, H), E = x.shape, weight.shape[0]
    out = x.new_empty(T, E, dtype=torch.float32)
    grid = (T, triton.cdiv(E, EXPERTS_A_PROGRAM))
    _logits[grid](x, weight, out, E, H=H, BE=EXPERTS_A_PROGRAM, BK=min(DEPTH, triton.next_power_of_2(H)), num_warps=4)
    return out


@triton.jit
def _choose(
    logits, bias, probs, ids, weights, E, least, K: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    token, e, k = tl.program_id(0).to(tl.int64), tl.arange(0, BE), tl.arange(0, BK)
    x = tl.load(logits + token * E + e, mask=e < E, other=float("-inf"))
    power = tl.exp(x - tl.max(x, 0))
    prob = power / tl.sum(power, 0)
    tl.store(probs + token * E + e, prob, mask=e < E)
    score = prob
    if BIASED:
        score += tl.load(bias + e, mask=e < E, other=0.0)
    # Those of experts that a bias forbids are above those of experts that are taken: none is chosen twice.
    score = tl.where(e < E, tl.maximum(score, LOWEST), float("-inf"))
    chosen, weight = tl.zeros((BK,), tl.int32), tl.zeros((BK,), tl.float32)
    for number in tl.static_range(K):
        best = tl.min(tl.where(score == tl.max(score, 0), e, E - 1), 0)  # of numbers that are none: some expert
        chosen = tl.where(k == number, best, chosen)
        weight = tl.where(k == number, tl.sum(tl.where(e == best, prob, 0.0), 0), weight)
        score = tl.where(e == best, float("-inf"), score)
    weight /= tl.maximum(tl.sum(weight, 0), least)
    tl.store(ids + token * K + k, chosen.to(tl.int64), mask=k < K)
    tl.store(weights + token * K + k, weight.to(weights.dtype.element_ty), mask=k < K)


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, choices: int, least: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities fp32 [T, E], experts int64 [T, K], weights [T, K]. least: of a sum of weights."""
    T, E = logits.shape
    probs, ids = torch.empty_like(logits), logits.new_empty(T, choices, dtype=torch.int64)
    weights = logits.new_empty(T, choices, dtype=dtype)
    _choose[(T,)](
        logits, bias, probs, ids, weights, E, least, K=choices, BK=triton.next_power_of_2(choices),
        BE=triton.next_power_of_2(E), BIASED=bias is not None, num_warps=1 if E <= 256 else 4,
    )  # fmt: skip
    return probs, ids, weights


@triton.jit
def _chosen(ids, start, R, BR: tl.constexpr, BE: tl.constexpr):
    """Rows, and a one for each in the column of its expert; rows past the last have none."""
    rows = start + tl.arange(0, BR)
    expert = tl.load(ids + rows, mask=rows < R, other=BE).to(tl.int32)
    return rows, (expert[:, None] == tl.arange(0, BE)[None, :]).to(tl.int32)


@triton.jit
def _order(ids, row_of, place_of, ends, R, E, BR: tl.constexpr, BE: tl.constexpr):
    e = tl.arange(0, BE)
    counts = tl.zeros((BE,), tl.int32)
    for start in range(0, R, BR):
        _, ones = _chosen(ids, start, R, BR, BE)
        counts += tl.sum(ones, 0)
    end = tl.cumsum(counts, 0)
    tl.store(ends + e, end, mask=e < E)
    begin = end - counts
    for start in range(0, R, BR):
        rows, ones = _chosen(ids, start, R, BR, BE)
        place = tl.sum((tl.cumsum(ones, 0) - 1 + begin[None, :]) * ones, 1).to(tl.int64)
        tl.store(place_of + rows, place, mask=rows < R)
        tl.store(row_of + place, rows.to(tl.int64), mask=rows < R)
        begin += tl.sum(ones, 0)


def order(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """row_of, place_of and ends of moe_permute.Order."""
    flat = ids.reshape(-1)
    R = flat.shape[0]
    row_of, place_of = torch.empty_like(flat), torch.empty_like(flat)
    ends = flat.new_empty(experts, dtype=torch.int32)
    most = triton.next_power_of_2(experts + 1)  # `experts` itself is of no expert, and last
    each = min(triton.next_power_of_2(R), max(16, 16384 // most))
    _order[(1,)](flat, row_of, place_of, ends, R, experts, BR=each, BE=most, num_warps=8)
    return row_of, place_of, ends


@triton.jit
def _gate_up(
    x, row_of, weights, matrices, ends, out, E, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = W // BN
    expert, first, left = rows_of_block(ends, E, tl.program_id(0) // tiles, BM, BE)
    if expert >= E:
        return
    i, k = tl.arange(0, BM), tl.arange(0, BK)
    cols = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    choice = tl.load(row_of + first + tl.minimum(i, left - 1))
    tokens = x + (choice // K)[:, None] * H + k[None, :]
    matrix = matrices + expert.to(tl.int64) * (2 * W * H) + cols[:, None] * H + k[None, :]
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for c in tl.range(0, H, BK, num_stages=STAGES):
        row = tl.load(tokens + c)
        gate = tl.dot(row, tl.load(matrix + c).T, gate)
        up = tl.dot(row, tl.load(matrix + W * H + c).T, up)
    kept = out.dtype.element_ty  # the product is rounded before SwiGLU, as where it is written in between
    gate, up = gate.to(kept).to(tl.float32), up.to(kept).to(tl.float32)
    act = gate * sigmoid(gate) * up * tl.load(weights + choice).to(tl.float32)[:, None]
    at = out + (first + i).to(tl.int64)[:, None] * W + cols[None, :]
    tl.store(at, act.to(kept), mask=(i < left)[:, None])


@triton.jit
def _down(
    rows, matrices, ends, out, E, H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = H // BN
    expert, first, left = rows_of_block(ends, E, tl.program_id(0) // tiles, BM, BE)
    if expert >= E:
        return
    i, k = tl.arange(0, BM), tl.arange(0, BK)
    cols = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    at = rows + (first + tl.minimum(i, left - 1)).to(tl.int64)[:, None] * W + k[None, :]
    matrix = matrices + expert.to(tl.int64) * (H * W) + cols[:, None] * W + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for c in tl.range(0, W, BK, num_stages=STAGES):
        acc = tl.dot(tl.load(at + c), tl.load(matrix + c).T, acc)
    to = out + (first + i).to(tl.int64)[:, None] * H + cols[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(i < left)[:, None])


@cache
def tile_for(device: torch.device) -> FewRowsTile:
    """Other vendors may not say what memory their processors have."""
    if device.type != "cuda":
        return PRODUCT
    found = torch.cuda.get_device_properties(device)
    return PRODUCT if getattr(found, "shared_memory_per_block_optin", 0) >= ROOM else SMALL


def fitting(most: int, width: int) -> int:
    """The largest power of two up to `most` that divides a width."""
    return min(most, width & -width)


def products(
    x: torch.Tensor,
    row_of: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    each: int,
) -> torch.Tensor:
    """x [T, H], weights [T, K], gate_up [E, 2 W, H], down [E, H, W] -> [R, H], the rows of an order, each weighed.
    each: rows of a tile."""
    (E, _, H), R, W = gate_up.shape, row_of.shape[0], gate_up.shape[1] // 2
    act, out = x.new_empty(R, W), x.new_empty(R, H)
    blocks, p = min(R, blocks_of(R, E, each)), tile_for(x.device)
    wide, high = fitting(p.cols, W), fitting(p.cols, H)
    tile = dict(H=H, W=W, BM=each, BE=triton.next_power_of_2(E), STAGES=p.stages, num_warps=p.warps)
    _gate_up[(blocks * (W // wide),)](
        x, row_of, weights, gate_up, ends, act, E, K=weights.shape[1], BN=wide, BK=fitting(p.depth, H), **tile
    )
    _down[(blocks * (H // high),)](act, down, ends, out, E, BN=high, BK=fitting(p.depth, W), **tile)
    return out
