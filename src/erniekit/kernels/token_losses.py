"""The loss of every single token, head fused in, in chunks: what preference losses add up per answer.

Called by models/layers/head.py and parallel/vocab.py. T tokens, n trained ones, H hidden, V vocab. cross_entropy.py
forms its gradients in forward, which needs one number for all tokens; here each token has its own upstream gradient.
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
    graphless,
    keep_row_gradients,
    logits_of,
    row_gradients,
    spans,
    trained_rows,
)
from erniekit.kernels.softmax import norms_and_targets, softmax_gradient


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
    chunk: int = CHUNK,
    count: int | None = None,
    shard: Shard | None = None,
) -> torch.Tensor:
    """hidden [T, H], weight [V, H], labels [T] -> negative log-likelihoods, fp32 [T], 0 where ignored.

    Ignored tokens never reach the head; a head that needs no gradient gets none formed. count: how many labels are
    not ignored, so that the host does not wait for the device. shard: the weight is a part of a wider head's, and dx
    this part's.
    """
    hidden, weight, bias = graphless(hidden, weight, bias)  # type: ignore[assignment]
    places = trained_rows(labels, ignore, count)
    losses = _LinearTokenLosses.apply(hidden, weight, bias, labels, places, chunk, shard)
    result: torch.Tensor = losses if places is None else losses.new_zeros(labels.shape[0]).index_copy(0, places, losses)
    return result


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore: int = -100,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, labels, ignore_index=ignore, reduction="none")


class _LinearTokenLosses(Function):
    """[n]. A frozen head's rows get their gradients in forward and their upstream in backward; where the head trains,
    its gradient needs both in one product, so only the rows' logsumexp is kept and backward computes logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        places: torch.Tensor | None,
        chunk: int,
        shard: Shard | None,
    ) -> torch.Tensor:
        x_all, y_all = at_places(hidden, labels, places, shard)
        want_x, *want_head = ctx.needs_input_grad[:3]
        parts = spans(x_all.shape[0], chunk, hidden)
        by_row = HeadGradients((want_x and not any(want_head), False, False), x_all.shape[0], weight, None, len(parts))
        norms = hidden.new_empty(x_all.shape[0], dtype=torch.float32)
        losses = torch.empty_like(norms)
        for span in parts:
            x, y = x_all[span], y_all[span]
            logits = logits_of(x, weight, bias)
            if shard is None:
                norms[span], picked, grad = norms_and_targets(logits, y, by_row.wanted)
                torch.sub(norms[span], picked, out=losses[span])
            else:
                norms[span], losses[span] = shard.join(*norms_and_targets(logits, y)[:2])
                grad = softmax_gradient(logits, y, norms[span]) if by_row.wanted else None
            if grad is not None:
                by_row.add(span, grad, x)
            del logits, grad  # before the next chunk needs the room
        keep_row_gradients(ctx, by_row, x_all, bias, y_all, norms, places, chunk, hidden.shape[0])
        return losses

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        return (*row_gradients(ctx, grad_out), *(None,) * 4)
