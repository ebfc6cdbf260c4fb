"""LM head + cross-entropy on trained tokens only, in chunks: the [tokens, vocab] logits are never whole in memory.

Called by losses/causal.py. T tokens, H hidden, V vocab.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 2048  # rows of logits alive at once; 2048 x 103,424 fp32 = 0.8 GiB


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """hidden [T, H], weight [V, H], labels [T] -> the SUM of token losses (fp32 scalar).

    Ignored tokens never reach the head; a head that needs no gradient gets none formed.
    """
    if not torch.is_grad_enabled():
        # Inside a Function `needs_input_grad` does not know of no_grad: evaluation would form gradients for nothing.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    kept = (labels != ignore).nonzero().squeeze(-1)
    if kept.numel() == 0:
        return hidden.float().sum() * 0.0  # keeps the graph, adds nothing
    if kept.numel() != labels.numel():
        hidden, labels = hidden.index_select(0, kept), labels.index_select(0, kept)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, chunk)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are formed chunk by chunk in the forward pass, where the logits are at hand, and scaled in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk):  # type: ignore[no-untyped-def]
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(hidden) if want_x else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if want_w else None
        grad_b = torch.zeros_like(bias, dtype=torch.float32) if want_b else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            x, y = hidden[rows], labels[rows]
            logits = F.linear(x, weight, bias).float()
            total += F.cross_entropy(logits, y, reduction="sum")
            if not (want_x or want_w or want_b):
                continue
            grad = logits.softmax(-1)
            grad[torch.arange(y.shape[0], device=y.device), y] -= 1.0
            low = grad.to(hidden.dtype)
            if grad_x is not None:
                grad_x[rows] = low @ weight
            if grad_w is not None:
                grad_w += (low.t() @ x).float()
            if grad_b is not None:
                grad_b += grad.sum(0)
        ctx.save_for_backward(grad_x, grad_w, grad_b)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        grad_x, grad_w, grad_b = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            # 1 / tokens rounded to bf16 would scale every gradient below the head by up to 0.4 %.
            None if grad_x is None else (grad_x.float() * grad_out).to(grad_x.dtype),
            None if grad_w is None else (grad_w * grad_out).to(weight_dtype),
            None if grad_b is None else (grad_b * grad_out).to(bias_dtype),
            None,
            None,
        )
