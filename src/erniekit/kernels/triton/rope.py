"""Rotary positions on a fused projection, in one sweep each way. Called by kernels/turn.py.

T tokens; a token's row holds heads of D channels: queries, keys, values. Values are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

TOKENS, HEADS, WARPS = 4, 2, 2  # a program's block, the fastest of nine measured (3.3 to 3.6 TB/s)


@triton.jit
def turn(
    q, k, v, q_out, k_out, v_out, cos, sin, tokens, length,
    q_row, q_place, q_head, k_row, k_place, k_head, v_row, v_place, v_head, q_token, kv_token,
    q_heads, kv_heads,
    HALVES: tl.constexpr, BACK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """q, k, v are read where their strides (of a row, a place in it, a head) say, and written where theirs of a token
    do; heads lie side by side there."""
    HALF: tl.constexpr = D // 2
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, place = token // length, token % length
    real = token < tokens
    is_q, is_k = head < q_heads, (head >= q_heads) & (head < q_heads + kv_heads)
    is_v = (head >= q_heads + kv_heads) & (head < q_heads + 2 * kv_heads)
    k_number, v_number = head - q_heads, head - q_heads - kv_heads
    from_q = ((row * q_row + place * q_place)[:, None] + head[None, :] * q_head)[:, :, None]
    from_k = ((row * k_row + place * k_place)[:, None] + k_number[None, :] * k_head)[:, :, None]
    from_v = ((row * v_row + place * v_place)[:, None] + v_number[None, :] * v_head)[:, :, None]
    to_q = ((token * q_token)[:, None] + head[None, :] * D)[:, :, None]
    to_k = ((token * kv_token)[:, None] + k_number[None, :] * D)[:, :, None]
    to_v = ((token * kv_token)[:, None] + v_number[None, :] * D)[:, :, None]
    of_q = (real[:, None] & is_q[None, :])[:, :, None]
    of_k = (real[:, None] & is_k[None, :])[:, :, None]
    of_v = (real[:, None] & is_v[None, :])[:, :, None]
    angle_at = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + angle_at, mask=real[:, None], other=1.0)
    s = tl.load(sin + angle_at, mask=real[:, None], other=0.0)
    turned = (is_q | is_k)[None, :, None]
    c = tl.where(turned, c[:, None, :], 1.0)
    s = tl.where(turned, s[:, None, :], 0.0)
    if BACK:
        s = -s
    kind = q_out.dtype.element_ty
    if HALVES:
        low = tl.arange(0, HALF)[None, None, :]
        a = tl.load(q + from_q + low, mask=of_q, other=0.0).to(tl.float32)
        a += tl.load(k + from_k + low, mask=of_k, other=0.0).to(tl.float32)
        a += tl.load(v + from_v + low, mask=of_v, other=0.0).to(tl.float32)
        b = tl.load(q + from_q + low + HALF, mask=of_q, other=0.0).to(tl.float32)
        b += tl.load(k + from_k + low + HALF, mask=of_k, other=0.0).to(tl.float32)
        b += tl.load(v + from_v + low + HALF, mask=of_v, other=0.0).to(tl.float32)
        first, second = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
        tl.store(q_out + to_q + low, first, mask=of_q)
        tl.store(k_out + to_k + low, first, mask=of_k)
        tl.store(v_out + to_v + low, first, mask=of_v)
        tl.store(q_out + to_q + low + HALF, second, mask=of_q)
        tl.store(k_out + to_k + low + HALF, second, mask=of_k)
        tl.store(v_out + to_v + low + HALF, second, mask=of_v)
    else:
        channel = tl.arange(0, D)[None, None, :]
        x = tl.load(q + from_q + channel, mask=of_q, other=0.0).to(tl.float32)
        x += tl.load(k + from_k + channel, mask=of_k, other=0.0).to(tl.float32)
        x += tl.load(v + from_v + channel, mask=of_v, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (TOKENS, HEADS, HALF, 2)))
        y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (TOKENS, HEADS, D)).to(kind)
        tl.store(q_out + to_q + channel, y, mask=of_q)
        tl.store(k_out + to_k + channel, y, mask=of_k)
        tl.store(v_out + to_v + channel, y, mask=of_v)


def launch(
    kernel: Any,
    given: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    halves: bool,
    back: bool,
    block: tuple[int, int, int] = (TOKENS, HEADS, WARPS),
) -> None:
    """q [B, L, Nq, D]; k, v [B, L, Nkv, D], channels of a head contiguous -> out, where q and k are turned (back: the
    other way). out: q, k, v as [T, ..] rows of any stride. cos, sin: fp32 [T, D / 2]."""
    B, L, Nq, D = given[0].shape
    Nkv = given[1].shape[2]
    strides = [n for t in given for n in (t.stride(0), t.stride(1), t.stride(2))]
    tokens, heads, warps = block
    grid = (triton.cdiv(B * L, tokens), triton.cdiv(Nq + 2 * Nkv, heads))
    kernel[grid](
        *given, *out, cos, sin, B * L, L, *strides, out[0].stride(0), out[1].stride(0), Nq, Nkv,
        HALVES=halves, BACK=back, TOKENS=tokens, HEADS=heads, D=D, num_warps=warps,
    )  # fmt: skip
