"""Attention over a pool of blocks, and storing into it, in Triton. Called by kernels/paged_attention.py.

A query head's group shares its keys: the heads of a group are the rows of one product. A long context of few sequences
is split between programs, whose parts a second kernel adds up (as flash-decoding does). How often it is split depends
on shapes only, never on lengths, so that a step can be recorded. T tokens, N heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS = 256  # that keep a card busy: two of each of its 132 processors
MOST_SPLITS = 16
LEAST_SPLIT = 128  # places that are worth a program of their own
_LOWEST = tl.constexpr(-1.0e30)  # finite: a program without places subtracts no infinities


@triton.jit
def _store(
    qkv, q_out, keys, values, cos, sin, turns, rows, places, tables, by_token, by_table, q_heads, kv_heads,
    SIZE: tl.constexpr, HALVES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    if HALVES:
        low, high = i, i + HALF
    else:
        low, high = 2 * i, 2 * i + 1
    at = qkv + token * by_token + head * D
    a, b = tl.load(at + low).to(tl.float32), tl.load(at + high).to(tl.float32)
    if head < q_heads + kv_heads:
        angle = tl.load(turns + token) * HALF + i
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        a, b = a * c - b * s, b * c + a * s
    if head < q_heads:
        to_q = q_out + (token * q_heads + head) * D
        tl.store(to_q + low, a.to(q_out.dtype.element_ty))
        tl.store(to_q + high, b.to(q_out.dtype.element_ty))
    else:
        row, place = tl.load(rows + token), tl.load(places + token)
        slot = tl.load(tables + row * by_table + place // SIZE).to(tl.int64) * SIZE + place % SIZE
        if head < q_heads + kv_heads:
            to = keys + (slot * kv_heads + head - q_heads) * D
        else:
            to = values + (slot * kv_heads + head - q_heads - kv_heads) * D
        tl.store(to + low, a.to(keys.dtype.element_ty))
        tl.store(to + high, b.to(keys.dtype.element_ty))


def store_turned(qkv: torch.Tensor, where: Any, turns: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    T, (_, kv_heads, D) = qkv.shape[0], keys.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    q = qkv.new_empty(T, heads, D)
    _store[T, heads + 2 * kv_heads](
        qkv, q, keys, values, turns.cos, turns.sin, turns.at, where.rows, where.places, where.tables,
        qkv.stride(0), where.tables.stride(0), heads, kv_heads,
        SIZE=where.size, HALVES=turns.halves, HALF=D // 2, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _tile(x, keys, values, tables, row, head, n, live, seen, top, total, sums, by_table, by_slot, scale,
          SIZE: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Places n of a sequence added to what queries x [rows, D] have of it so far."""
    d = tl.arange(0, D)
    block = tl.load(tables + row * by_table + n // SIZE, mask=live, other=0).to(tl.int64)
    at = (block * SIZE + n % SIZE)[:, None] * by_slot + head * D + d[None, :]
    k = tl.load(keys + at, mask=live[:, None], other=0.0)
    v = tl.load(values + at, mask=live[:, None], other=0.0)
    score = tl.where(seen, tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    share = tl.exp2(score - higher[:, None])
    less = tl.exp2(top - higher)
    sums = sums * less[:, None] + tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * less + tl.sum(share, 1), sums


@triton.jit
def _one(
    q, keys, values, out, parts, stats, rows, places, tables, by_table, by_slot, scale, kv_heads,
    SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, count = tl.load(rows + token), (tl.load(places + token) + 1).to(tl.int32)
    each = tl.cdiv(tl.cdiv(count, SPLITS), BN) * BN
    first = split * each
    last = tl.minimum(first + each, count)
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    own = (token * kv_heads + head) * GROUP + g  # heads of the group
    real = g[:, None] < GROUP
    x = tl.load(q + own[:, None] * D + d[None, :], mask=real, other=0.0)
    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for start in range(first, last, BN):
        n = start + tl.arange(0, BN)
        live = n < last
        top, total, sums = _tile(x, keys, values, tables, row, head, n, live, live[None, :], top, total, sums,
                                 by_table, by_slot, scale, SIZE, D, PRECISION)  # fmt: skip
    if SPLITS == 1:
        tl.store(out + own[:, None] * D + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        part = own * SPLITS + split
        tl.store(parts + part[:, None] * D + d[None, :], sums, mask=real)
        tl.store(stats + 2 * part, top, mask=g < GROUP)
        tl.store(stats + 2 * part + 1, total, mask=g < GROUP)


@triton.jit
def _joined(out, parts, stats, SPLITS: tl.constexpr, D: tl.constexpr):
    """The parts of one head of one token."""
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, SPLITS), tl.arange(0, D)
    part = head * SPLITS + i
    top, total = tl.load(stats + 2 * part), tl.load(stats + 2 * part + 1)
    weight = tl.exp2(top - tl.max(top, 0))
    sums = tl.sum(tl.load(parts + part[:, None] * D + d[None, :]) * weight[:, None], 0)
    tl.store(out + head * D + d, (sums / tl.sum(total * weight, 0)).to(out.dtype.element_ty))


def splits_for(tokens: int, kv_heads: int, longest: int) -> int:
    """A power of two: for as many programs as fill a card, each with places enough."""
    wanted = min(MOST_SPLITS, PROGRAMS // max(1, tokens * kv_heads), longest // LEAST_SPLIT)
    return 1 << max(0, wanted.bit_length() - 1)


def _shape(q: torch.Tensor, keys: torch.Tensor) -> tuple[int, float, str]:
    """(heads of a group, the scale of scores in powers of two, how fp32 is multiplied)."""
    exact = "ieee" if q.dtype == torch.float32 else "tf32"
    return q.shape[1] // keys.shape[1], q.shape[2] ** -0.5 * 1.4426950408889634, exact


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: Any, splits: int | None = None
) -> torch.Tensor:
    """Each token is of another sequence."""
    T, N, D = q.shape
    group, scale, precision = _shape(q, keys)
    kv_heads = keys.shape[1]
    if splits is None:
        splits = splits_for(T, kv_heads, where.tables.shape[1] * where.size)
    out = torch.empty_like(q)
    parts = stats = out
    if splits > 1:
        parts, stats = (q.new_empty(T * N * splits, width, dtype=torch.float32) for width in (D, 2))
    _one[T, kv_heads, splits](
        q, keys, values, out, parts, stats, where.rows, where.places, where.tables, where.tables.stride(0),
        keys.stride(0), scale, kv_heads,
        SIZE=where.size, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D=D, BN=64 if D <= 128 else 32,
        SPLITS=splits, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _joined[(T * N,)](out, parts, stats, SPLITS=splits, D=D, num_warps=2)
    return out


@triton.jit
def _tiles(
    q, keys, values, out, firsts, counts, rows, places, tables, by_table, by_slot, scale, heads,
    SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + tile)
    if count > 0:
        first = tl.load(firsts + tile).to(tl.int64)
        row, place = tl.load(rows + first), tl.load(places + first).to(tl.int32)
        m, d = tl.arange(0, ROWS), tl.arange(0, D)
        at = ((first + m) * heads + head)[:, None] * D + d[None, :]
        real = m[:, None] < count
        x = tl.load(q + at, mask=real, other=0.0)
        top = tl.full([ROWS], _LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, D], tl.float32)
        last = place + count
        for start in range(0, last, BN):
            n = start + tl.arange(0, BN)
            seen = n[None, :] <= (place + m)[:, None]
            top, total, sums = _tile(x, keys, values, tables, row, head // GROUP, n, n < last, seen, top, total, sums,
                                     by_table, by_slot, scale, SIZE, D, PRECISION)  # fmt: skip
        tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=real)


def attend_tiles(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: Any, tiles: Any) -> torch.Tensor:
    """Tokens of a tile follow one another in one sequence. Those of no tile are given nothing."""
    _, N, D = q.shape
    group, scale, precision = _shape(q, keys)
    out = torch.empty_like(q)
    _tiles[tiles.firsts.shape[0], N](
        q, keys, values, out, tiles.firsts, tiles.counts, where.rows, where.places, where.tables,
        where.tables.stride(0), keys.stride(0), scale, N,
        SIZE=where.size, GROUP=group, ROWS=max(16, tiles.rows), D=D, BN=64 if D <= 128 else 32, PRECISION=precision,
        num_warps=4,
    )  # fmt: skip
    return out
