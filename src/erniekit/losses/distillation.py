"""The loss of SFT with a teacher: its probabilities are computed for each micro-batch and forgotten with it.

recipes/distillation.py builds it; train/step.py calls it. An evaluation is the cross-entropy of the data only, so that
it can be compared with a run without a teacher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.data.types import Batch
from erniekit.kernels.distillation import Mix, Teacher, linear_distillation
from erniekit.losses.causal import causal_loss
from erniekit.losses.dpo import MetricsSink
from erniekit.losses.wrapped_head import WrappedHead

METRICS = ("ce_loss", "kl_loss")


class KeptHidden(nn.Module):
    """In the place of a teacher's head: hands out the states and weights that its logits would be made of."""

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return Teacher(hidden.flatten(0, 1), weight, bias)


class DistillingHead(WrappedHead):
    """In the place of a student's head: compares with the teacher's states of this micro-batch, if there are any."""

    def __init__(self, inner: nn.Module, mix: Mix) -> None:
        super().__init__(inner)
        self.mix = mix
        self.teacher: Teacher | None = None
        self.sums: torch.Tensor | None = None  # of the last call: cross-entropy, KL

    def loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        ignore: int,
        chunk: int,
        count: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if self.teacher is None:
            out: torch.Tensor = self.inner.loss(hidden, weight, labels, bias, ignore, chunk, count, scale)
            return out
        loss, self.sums = linear_distillation(
            hidden.flatten(0, 1), weight, labels.flatten(), bias, self.teacher, self.mix, ignore, chunk, count, scale
        )
        return loss


class DistillationLoss:
    def __init__(self, chunk: int, step_metrics: MetricsSink | None) -> None:
        self.chunk, self.step_metrics = chunk, step_metrics
        self.teacher: nn.Module | None = None  # once it is loaded
        self.head: DistillingHead | None = None

    def __call__(
        self, model: nn.Module, batch: Batch, hidden: torch.Tensor | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """The SUM over trained tokens, as causal_loss."""
        if self.teacher is None or self.head is None or not model.training:
            return causal_loss(model, batch, hidden, self.chunk, scale)
        with torch.no_grad():
            self.head.teacher = self.teacher(
                batch.input_ids, batch.positions, batch.documents(), batch.max_doc, more=batch.more()
            )
        try:
            loss = causal_loss(model, batch, hidden, self.chunk, scale)
        finally:
            self.head.teacher = None
        if self.step_metrics is not None and self.head.sums is not None:
            for name, total in zip(METRICS, self.head.sums):
                self.step_metrics.add(name, total, batch.num_label_tokens)
        return loss
