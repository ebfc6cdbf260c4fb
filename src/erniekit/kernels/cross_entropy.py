"""LM head + cross-entropy on trained tokens only, in chunks: the [tokens, vocab] logits are never whole in memory.

Called by models/layers/head.py and parallel/vocab.py. T tokens, H hidden, V vocab.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.head_gradients import (
    CHUNK,
    HeadGradients,
    Shard,
    at_places,
    formed_gradients,
    graphless,
    keep_formed,
    logits_of,
    spans,
    trained_rows,
)
from erniekit.kernels.softmax import loss_and_gradient, norms_and_targets, softmax_gradient

__all__ = ["CHUNK", "linear_cross_entropy", "reference"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
    chunk: int = CHUNK,
    count: int | None = None,
    scale: float | None = None,
    shard: Shard | None = None,
) -> torch.Tensor:
    """hidden [T, H], weight [V, H], labels [T] -> the SUM of token losses (fp32 scalar), times scale.

    Ignored tokens never reach the head; a head that needs no gradient gets none formed. count: how many labels are
    trained, so that the host does not wait for the device. scale: gradients are final once they are formed, which saves
    a pass over the head's; the loss must then be what backward starts from, by itself or as a term of a sum: its own
    gradient is 1. shard: the weight is a part of a wider head's, and dx this part's.
    """
    hidden, weight, bias = graphless(hidden, weight, bias)  # type: ignore[assignment]
    places = trained_rows(labels, ignore, count)
    if places is not None and not places.numel():
        # Zero, of all that others on other ranks have labels for: what has no gradient here would not be reduced here.
        given = [t[:0].float().sum() for t in (hidden, weight, bias) if t is not None]
        return torch.stack(given).sum()
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, places, chunk, scale, shard)
    return result


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")


class _LinearCrossEntropy(Function):
    """Gradients are formed chunk by chunk in the forward pass, where the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        places: torch.Tensor | None,
        chunk: int,
        scale: float | None,
        shard: Shard | None,
    ) -> torch.Tensor:
        x_all, y_all = at_places(hidden, labels, places, shard)
        parts = spans(x_all.shape[0], chunk, hidden)
        formed = HeadGradients(ctx.needs_input_grad, x_all.shape[0], weight, bias, len(parts))
        total = hidden.new_zeros((), dtype=torch.float32)
        for span in parts:
            x, y = x_all[span], y_all[span]
            logits, grad = logits_of(x, weight, bias), None
            if shard is None:
                loss, grad = loss_and_gradient(logits, y, scale, formed.wanted)
            else:
                norms, losses = shard.join(*norms_and_targets(logits, y)[:2])
                loss = losses.sum()
                if formed.wanted:
                    grad = softmax_gradient(logits, y, norms, scale=scale)
            total += loss
            if grad is not None:
                formed.add(span, grad, x)
            del logits, grad  # before the next chunk needs the room
        keep_formed(ctx, formed, hidden.shape[0], places, scale)
        return total if scale is None else total * scale

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        return (*formed_gradients(ctx, grad_out), *(None,) * 5)
