"""Rotary positions on a fused projection, in one sweep each way. Called by kernels/rope_qkv.py.

T tokens; a token's row holds heads of D channels: queries, keys, values. Values are copied as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

TOKENS, HEADS, WARPS = 4, 2, 2  # a program's block, the fastest of nine measured (3.3 to 3.6 TB/s)


@triton.jit
def _heads(
    given, out, cos, sin, token, real, row, place, head, by_row, by_place, by_head, by_token,
    TURN: tl.constexpr, HALVES: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """HEADS heads from `head` on, of some tokens."""
    HALF: tl.constexpr = D // 2
    heads = head + tl.arange(0, HEADS)
    start = ((row * by_row + place * by_place)[:, None] + (heads * by_head)[None, :])[:, :, None]
    to = ((token * by_token)[:, None] + (heads * D)[None, :])[:, :, None]
    own = real[:, None, None]
    kind = out.dtype.element_ty
    if TURN:
        angle_at = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
        c = tl.load(cos + angle_at, mask=real[:, None], other=1.0)[:, None, :]
        s = tl.load(sin + angle_at, mask=real[:, None], other=0.0)[:, None, :]
        if BACK:
            s = -s
        if HALVES:
            low = tl.arange(0, HALF)[None, None, :]
            a = tl.load(given + start + low, mask=own, other=0.0).to(tl.float32)
            b = tl.load(given + start + low + HALF, mask=own, other=0.0).to(tl.float32)
            tl.store(out + to + low, (a * c - b * s).to(kind), mask=own)
            tl.store(out + to + low + HALF, (b * c + a * s).to(kind), mask=own)
        else:
            channel = tl.arange(0, D)[None, None, :]
            x = tl.load(given + start + channel, mask=own, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (token.shape[0], HEADS, HALF, 2)))
            y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (token.shape[0], HEADS, D))
            tl.store(out + to + channel, y.to(kind), mask=own)
    else:
        channel = tl.arange(0, D)[None, None, :]
        tl.store(out + to + channel, tl.load(given + start + channel, mask=own, other=0.0).to(kind), mask=own)


@triton.jit
def _turned(
    q, k, v, q_out, k_out, v_out, cos, sin, tokens, length,
    q_row, q_place, q_head, k_row, k_place, k_head, v_row, v_place, v_head, q_token, kv_token,
    q_heads, kv_heads,
    HALVES: tl.constexpr, BACK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """q, k, v are read by their strides (of a row, a place in it, a head), and written by theirs of a token;
    heads lie side by side there. HEADS divides both numbers of heads."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1) * HEADS
    row, place = token // length, token % length
    real = token < tokens
    if head < q_heads:
        _heads(q, q_out, cos, sin, token, real, row, place, head, q_row, q_place, q_head, q_token,
               True, HALVES, BACK, HEADS, D)  # fmt: skip
    elif head < q_heads + kv_heads:
        _heads(k, k_out, cos, sin, token, real, row, place, head - q_heads, k_row, k_place, k_head, kv_token,
               True, HALVES, BACK, HEADS, D)  # fmt: skip
    else:
        _heads(v, v_out, cos, sin, token, real, row, place, head - q_heads - kv_heads, v_row, v_place, v_head, kv_token,
               False, HALVES, BACK, HEADS, D)  # fmt: skip


@triton.jit
def turn(
    q, k, v, q_out, k_out, v_out, cos, sin, tokens, length,
    q_row, q_place, q_head, k_row, k_place, k_head, v_row, v_place, v_head, q_token, kv_token,
    q_heads, kv_heads, HALVES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    _turned(
        q, k, v, q_out, k_out, v_out, cos, sin, tokens, length,
        q_row, q_place, q_head, k_row, k_place, k_head, v_row, v_place, v_head, q_token, kv_token,
        q_heads, kv_heads, HALVES, False, TOKENS, HEADS, D,
    )  # fmt: skip


@triton.jit
def turn_back(
    q, k, v, out, cos, sin, tokens, length,
    q_row, q_place, q_head, k_row, k_place, k_head, v_row, v_place, v_head, token,
    q_heads, kv_heads, HALVES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One output: of three views into one tensor a compiler would make three copies first."""
    k_out = out + q_heads * D
    _turned(
        q, k, v, out, k_out, k_out + kv_heads * D, cos, sin, tokens, length,
        q_row, q_place, q_head, k_row, k_place, k_head, v_row, v_place, v_head, token, token,
        q_heads, kv_heads, HALVES, True, TOKENS, HEADS, D,
    )  # fmt: skip


def launch(
    kernel: Any,
    given: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    halves: bool,
    block: tuple[int, int, int] = (TOKENS, HEADS, WARPS),
) -> None:
    """q [B, L, Nq, D]; k, v [B, L, Nkv, D], channels of a head contiguous -> out, where q and k are turned, by
    `turn_back` the other way. out: q, k, v as [T, ..] rows, of turn_back one with all three. cos, sin: fp32 [T, D / 2].
    """
    B, L, Nq, D = given[0].shape
    Nkv = given[1].shape[2]
    strides = [n for t in given for n in (t.stride(0), t.stride(1), t.stride(2))]
    tokens, heads, warps = block
    heads = math.gcd(heads, math.gcd(Nq, Nkv))
    grid = (triton.cdiv(B * L, tokens), (Nq + 2 * Nkv) // heads)
    kernel[grid](
        *given, *out, cos, sin, B * L, L, *strides, *(t.stride(0) for t in out[:2]), Nq, Nkv,
        HALVES=halves, TOKENS=tokens, HEADS=heads, D=D, num_warps=warps,
    )  # fmt: skip
