"""The loss of every single token, head fused in, in chunks: what preference losses add up per answer.

Called by models/layers/head.py. T tokens, H hidden, V vocab. cross_entropy.py forms its gradients in forward, which
needs one number for all tokens; here each token has its own upstream gradient, so backward computes logits again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels.cross_entropy import CHUNK


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """hidden [T, H], weight [V, H], labels [T] -> negative log-likelihoods, fp32 [T], 0 where ignored.

    Ignored tokens never reach the head; a head that needs no gradient gets none formed.
    """
    kept = (labels != ignore).nonzero().squeeze(-1)
    rows, targets = hidden.index_select(0, kept), labels.index_select(0, kept)
    losses = _LinearTokenLosses.apply(rows, weight, bias, targets, chunk)
    return losses.new_zeros(labels.shape[0]).index_copy(0, kept, losses)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, labels, ignore_index=ignore, reduction="none")


class _LinearTokenLosses(torch.autograd.Function):
    """Of each chunk only the rows' logsumexp is kept."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        norms = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        losses = torch.empty_like(norms)
        for at in range(0, hidden.shape[0], chunk):
            rows = slice(at, at + chunk)
            logits = F.linear(hidden[rows], weight, bias).float()
            norms[rows] = logits.logsumexp(-1)
            losses[rows] = norms[rows] - logits.gather(1, labels[rows, None]).squeeze(1)
        ctx.save_for_backward(hidden, weight, bias, labels, norms)
        ctx.chunk = chunk
        return losses

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, bias, labels, norms = ctx.saved_tensors
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(hidden) if want_x else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if want_w else None
        grad_b = torch.zeros_like(bias, dtype=torch.float32) if want_b else None
        for at in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(at, at + ctx.chunk)
            x, upstream = hidden[rows], grad_out[rows, None].float()
            grad = F.linear(x, weight, bias).float().sub_(norms[rows, None]).exp_().mul_(upstream)
            grad.scatter_add_(1, labels[rows, None], -upstream)
            low = grad.to(hidden.dtype)
            if grad_x is not None:
                grad_x[rows] = low @ weight
            if grad_w is not None:
                grad_w += (low.t() @ x).float()
            if grad_b is not None:
                grad_b += grad.sum(0)
        return (
            grad_x,
            None if grad_w is None else grad_w.to(weight.dtype),
            None if grad_b is None else grad_b.to(bias.dtype),
            None,
            None,
        )
