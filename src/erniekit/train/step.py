"""One optimiser step: micro-batches in, one update out. Called by train/trainer.py.

The loss is divided by the trained tokens of the whole step, so 8 x 1 and 1 x 8 give the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from erniekit.data.types import Batch
from erniekit.optim.adamw import AdamW
from erniekit.optim.schedule import Schedule

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]  # -> the sum of token losses


@dataclass(frozen=True)
class StepResult:
    step: int
    loss: float  # mean over trained tokens
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int
    trained_tokens: int
    sum_squares: int  # of document lengths
    applied: bool  # False: not finite, nothing was changed


class TrainStep:
    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        schedule: Schedule,
        loss: LossFunction,
        device: torch.device,
        max_grad_norm: float = 1.0,
        compat: bool = False,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.loss = model, optimizer, schedule, loss
        self.device, self.max_grad_norm = device, max_grad_norm
        # ERNIEKit: the mean of micro-batch means, so a micro-batch with few trained tokens weighs as much as any.
        self.mean_of_means = compat

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        trained = sum(b.num_label_tokens for b in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            if batch.num_label_tokens == 0:
                continue
            share = batch.num_label_tokens * len(batches) if self.mean_of_means else trained
            loss = self.loss(self.model, batch.to(self.device)) / share
            loss.backward()
            total += loss.detach()
        norm = self.optimizer.gradient_norm()
        loss_value, norm_value = torch.stack((total, norm.to(total.device))).tolist()
        lr = self.schedule.for_update(step)
        applied = _finite(loss_value) and _finite(norm_value)
        if applied:
            self.optimizer.clip(norm, self.max_grad_norm)
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        return StepResult(
            step=step,
            loss=loss_value,
            grad_norm=norm_value,
            learning_rate=lr,
            tokens=sum(b.num_tokens for b in batches),
            trained_tokens=trained,
            sum_squares=sum(b.sum_squares for b in batches),
            applied=applied,
        )


def _finite(value: float) -> bool:
    return value - value == 0.0
