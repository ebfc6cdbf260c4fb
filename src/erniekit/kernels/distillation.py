"""Two LM heads, the KL divergence between them and cross-entropy, in chunks of trained tokens: neither model's
[tokens, vocab] logits are ever whole in memory.

Called by losses/distillation.py. T tokens, n trained ones, R rows of a chunk, H hidden, G the teacher's, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.head_gradients import (
    CHUNK,
    HeadGradients,
    formed_gradients,
    graphless,
    keep_formed,
    logits_of,
    trained_rows,
)


@dataclass(frozen=True)
class Mix:
    alpha: float = 0.5  # of the divergence; cross-entropy has the rest
    temperature: float = 1.0
    reverse: bool = False  # KL(student, teacher) instead of KL(teacher, student)


class Teacher(NamedTuple):
    """What the other head is computed from."""

    hidden: torch.Tensor  # [T, G]
    weight: torch.Tensor  # [V, G]
    bias: torch.Tensor | None


def linear_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    teacher: Teacher,
    mix: Mix,
    ignore: int = -100,
    chunk: int = CHUNK,
    count: int | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [T, H], weight [V, H], labels [T] -> the SUM over trained tokens of alpha KL + (1 - alpha) cross-entropy,
    fp32 and times scale; and both sums by themselves, [2]: cross-entropy, KL. Arguments as linear_cross_entropy's."""
    hidden, weight, bias = graphless(hidden, weight, bias)  # type: ignore[assignment]
    places = trained_rows(labels, ignore, count)
    sums = hidden.new_zeros(2, dtype=torch.float32)
    if places is not None and not places.numel():
        given = [t[:0].float().sum() for t in (hidden, weight, bias) if t is not None]
        return torch.stack(given).sum(), sums
    loss: torch.Tensor = _LinearDistillation.apply(
        hidden, weight, bias, labels, places, teacher, mix, chunk, scale, sums
    )
    return loss, sums


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, mix: Mix, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [R, V] in fp32 -> the SUM of the rows' divergences and, if wanted, its gradient for the student's."""
    log_q = (student / mix.temperature).log_softmax(-1)
    log_p = (teacher / mix.temperature).log_softmax(-1)
    if mix.reverse:
        q, apart = log_q.exp(), log_q - log_p
        rows = (q * apart).sum(-1, keepdim=True)
        return rows.sum(), q * (apart - rows) / mix.temperature if gradient else None
    p = log_p.exp()
    total = (p * (log_p - log_q)).sum()
    return total, (log_q.exp() - p) / mix.temperature if gradient else None


class _LinearDistillation(Function):
    """Gradients are formed chunk by chunk in the forward pass, where both models' logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        places: torch.Tensor | None,
        teacher: Teacher,
        mix: Mix,
        chunk: int,
        scale: float | None,
        sums: torch.Tensor,
    ) -> torch.Tensor:
        x_all, y_all, theirs = hidden, labels, teacher.hidden
        if places is not None:
            x_all, y_all, theirs = (t.index_select(0, places) for t in (hidden, labels, teacher.hidden))
        starts = range(0, x_all.shape[0], chunk)
        formed = HeadGradients(ctx.needs_input_grad, x_all.shape[0], weight, bias, len(starts))
        for at in starts:
            span = slice(at, min(at + chunk, x_all.shape[0]))
            x, y = x_all[span], y_all[span]
            logits = logits_of(x, weight, bias).float()
            other = F.linear(theirs[span], teacher.weight, teacher.bias).float()
            apart, grad = divergence(logits, other, mix, formed.wanted)
            del other
            sums += torch.stack((F.cross_entropy(logits, y, reduction="sum"), apart))
            if grad is not None:
                hard = logits.softmax(-1)
                hard[torch.arange(len(y), device=y.device), y] -= 1.0
                grad = grad.mul_(mix.alpha).add_(hard, alpha=1 - mix.alpha)
                formed.add(span, grad if scale is None else grad.mul_(scale), x)
            del logits, grad  # before the next chunk needs the room
        keep_formed(ctx, formed, hidden.shape[0], places, scale)
        total = mix.alpha * sums[1] + (1 - mix.alpha) * sums[0]
        return total if scale is None else total * scale

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        return (*formed_gradients(ctx, grad_out), *(None,) * 7)
