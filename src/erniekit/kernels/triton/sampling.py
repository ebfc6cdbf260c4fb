"""Drawing tokens, a row of logits a program. Called by kernels/sampling.py, which defines what is computed.

Thresholds are found by halving the range of a score's or a weight's bits, a sweep over the row each: a row of 103,424
columns is 200 to 400 KiB and stays in the cache. A greedy row is swept once. R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 8192
WARPS = 16
_UNIT = tl.constexpr(2.0**40)
_GOLDEN = tl.constexpr(-7046029254386353131)
_FIRST = tl.constexpr(-4658895280553007687)
_SECOND = tl.constexpr(-7723592293110705685)


@triton.jit
def _mixed(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _scores(at, start, columns, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(at + column, mask=column < columns, other=float("-inf")).to(tl.float32), column


@triton.jit
def _order(x):
    """int32 that is larger where x is."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(x, highest, heat):
    """int64: of the highest 2**40."""
    return (tl.exp((x - highest) / heat) * _UNIT).to(tl.int64)


@triton.jit
def _mass(at, columns, highest, heat, low, least, V: tl.constexpr, BLOCK: tl.constexpr):
    """int64: the sum of the weights from `least` on of scores from `low` on."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        x, _ = _scores(at, start, columns, BLOCK)
        weight = _weights(x, highest, heat)
        total += tl.where((_order(x) >= low) & (weight >= least), weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _rows(
    logits, out, temperatures, top_ps, top_ks, vocabs, seeds, places, by_row, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * by_row
    columns = tl.minimum(tl.load(vocabs + row), V).to(tl.int32)
    highest = float("-inf")
    first = 0
    wrong = 0
    for start in range(0, V, BLOCK):
        x, column = _scores(at, start, columns, BLOCK)
        wrong += tl.sum((x != x).to(tl.int32), 0)
        here = tl.max(x, 0)
        where = tl.min(tl.where(x == here, column, V), 0)
        first = tl.where(here > highest, where, first)
        highest = tl.maximum(highest, here)
    chosen = first
    heat = tl.load(temperatures + row)
    sound = (wrong == 0) & (highest > float("-inf")) & (highest < float("inf"))
    if sound & (heat > 0):
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        # Scores below this one are out: the largest that top_k of them reach.
        low = tl.full([], -2147483647, tl.int32)
        if (top_k > 0) & (top_k < columns):
            high = _order(highest)
            while low < high:
                # The upper middle without overflow; low and high are of 32 bits and may have other signs.
                middle = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
                count = tl.zeros([BLOCK], tl.int32)
                for start in range(0, V, BLOCK):
                    x, column = _scores(at, start, columns, BLOCK)
                    count += ((_order(x) >= middle) & (column < columns)).to(tl.int32)
                enough = tl.sum(count, 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
        # Weights below this one are out: the largest that a share of top_p reaches.
        least = tl.full([], 1, tl.int64)
        mass = _mass(at, columns, highest, heat, low, least, V, BLOCK)
        if top_p < 1:
            share = tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
            most = tl.full([], 1 << 40, tl.int64)
            while least < most:
                middle = (least + most + 1) >> 1
                enough = _mass(at, columns, highest, heat, low, middle, V, BLOCK) >= share
                least = tl.where(enough, middle, least)
                most = tl.where(enough, most, middle - 1)
            mass = _mass(at, columns, highest, heat, low, least, V, BLOCK)
        bits = _mixed(_mixed(tl.load(seeds + row) + _GOLDEN) + tl.load(places + row) * _GOLDEN)
        bits = (bits >> 11) & 0x1FFFFFFFFFFFFF
        target = (bits.to(tl.float64) * 1.1102230246251565e-16 * mass.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, mass - 1)
        before = tl.zeros([], tl.int64)
        found = tl.full([], 2147483647, tl.int32)
        for start in range(0, V, BLOCK):
            x, column = _scores(at, start, columns, BLOCK)
            weight = _weights(x, highest, heat)
            weight = tl.where((_order(x) >= low) & (weight >= least), weight, 0)
            sums = before + tl.cumsum(weight, 0)
            found = tl.minimum(found, tl.min(tl.where(sums > target, column, 2147483647), 0))
            before += tl.sum(weight, 0)
        chosen = found
    tl.store(out + row, tl.where(sound, chosen, -1).to(tl.int64))


def draw(logits: torch.Tensor, params: Any, places: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    R, V = logits.shape
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    _rows[(R,)](
        logits, out, params.temperature, params.top_p, params.top_k, params.vocab, params.seed, places,
        logits.stride(0), V=V, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return out
