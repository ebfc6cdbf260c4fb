"""A fused projection to queries, keys and values with their positions, on a CUDA card. Called by models/layers.

rope.py is the reference. Compiled layers take the kernel in as it is (kernel_op.py), so that it costs the host nothing
of its own. B batch, L length, T = B * L tokens, N heads, D head_dim, C = (Nq + 2 Nkv) * D.
"""

from __future__ import annotations

from typing import Any

import torch

from erniekit.kernels.kernel_op import KernelOp

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def turned(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, halves: bool) -> QKV:
    """qkv [B, L, C]; cos, sin fp32 [B, L, 1, D / 2] -> q [B, L, Nq, D], k, v [B, L, Nkv, D]."""
    half = cos.shape[-1]
    result: QKV = _turn(qkv, cos.reshape(-1, half), sin.reshape(-1, half), heads, kv_heads, halves)
    return result


def _parts(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, halves: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, L, _ = qkv.shape
    q, k, v = (qkv.new_empty(B, L, n, 2 * cos.shape[-1]) for n in (heads, kv_heads, kv_heads))
    return q, k, v


def _launch(
    launcher: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, halves: bool
) -> QKV:
    from erniekit.kernels.triton import rope

    (B, L, _), D = qkv.shape, 2 * cos.shape[-1]
    counts = (heads, kv_heads, kv_heads)
    given = [t.unflatten(-1, (n, D)) for t, n in zip(qkv.split([n * D for n in counts], dim=-1), counts)]
    out = _parts(qkv, cos, sin, heads, kv_heads, halves)
    rope.launch(launcher(rope.turn), given, [t.view(B * L, -1) for t in out], cos, sin, halves)
    return out


def _whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool
) -> torch.Tensor:
    """Gradients of q, k, v [B, L, N, D], laid out in any way -> that of the projection [B, L, C]."""
    return q.new_empty(*q.shape[:2], sum(t.shape[2] for t in (q, k, v)) * q.shape[3])


def _launch_back(
    launcher: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool
) -> torch.Tensor:
    from erniekit.kernels.triton import rope

    out = _whole(q, k, v, cos, sin, halves)
    rope.launch(launcher(rope.turn_back), (q, k, v), (out.flatten(0, 1),), cos, sin, halves)
    return out


_turn = KernelOp("turn", _parts, _launch)
_turn_back = KernelOp("turn_back", _whole, _launch_back)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, _, _, ctx.halves = inputs
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    # A head's channels side by side: what the kernel reads; all else lies as it comes.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _turn_back(q, k, v, *ctx.saved_tensors, ctx.halves), None, None, None, None, None


_turn.register_autograd(_gradient, _keep)
