"""One optimiser step: micro-batches in, one update out. Called by train/trainer.py.

The loss is divided by the trained tokens of the whole step over all ranks, so 8 x 1, 1 x 8 and any layout give the
same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from erniekit.data.types import Batch
from erniekit.optim.adamw import AdamW
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine


@dataclass(frozen=True)
class StepResult:
    step: int
    loss: float  # mean over trained tokens
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # of this rank's packs
    trained_tokens: int  # of all ranks
    sum_squares: int  # of this rank's document lengths
    applied: bool  # False: not finite, nothing was changed
    extras: dict[str, float] = field(default_factory=dict)  # what else the step tells: rewards, router losses


class TrainStep:
    def __init__(
        self,
        engine: Engine,
        optimizer: AdamW,
        schedule: Schedule,
        max_grad_norm: float = 1.0,
        compat: bool = False,
        prepare: Callable[[Sequence[Batch]], Sequence[Batch]] | None = None,
    ) -> None:
        """prepare: what must be known of a step's micro-batches before their forward pass, e.g. a reference's view."""
        self.engine, self.optimizer, self.schedule = engine, optimizer, schedule
        self.max_grad_norm = max_grad_norm
        # ERNIEKit: the mean of micro-batch means, so a micro-batch with few trained tokens weighs as much as any.
        self.mean_of_means = compat
        self.prepare = prepare
        self.phase: Callable[[str], None] = lambda name: None  # the trainer listens

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        engine, optimizer = self.engine, self.optimizer
        # Waiting for other ranks is never booked as this rank's own work: that is how a slow one is told from the rest.
        self.phase("collective")
        weight, trained = engine.totals(sum(b.weight for b in batches), sum(b.num_label_tokens for b in batches))
        self.phase("forward/backward")
        if self.prepare is not None:
            batches = self.prepare(batches)
        total = engine.forward_backward(batches, self._shares(batches, weight))
        grads = optimizer.gradients()
        self.phase("collective")
        total = engine.sum_losses(total)
        if engine.sync is None:
            norm = optimizer.gradient_norm()
        else:
            engine.sync.reduce(grads)
            norm = engine.sync.norm(grads)
        told = torch.cat((torch.stack((total, norm.to(total.device))).double(), engine.told().to(total.device)))
        loss_value, norm_value, *extras = told.tolist()
        names = engine.ledger.names if engine.ledger is not None else ()
        self.phase("update")
        lr = self.schedule.for_update(step)
        # Both numbers are the same on every rank, and so is the decision.
        applied = _finite(loss_value) and _finite(norm_value)
        if applied:
            optimizer.clip(norm, self.max_grad_norm)
            optimizer.step(lr)
        optimizer.zero_grad()
        return StepResult(
            step=step,
            loss=loss_value,
            grad_norm=norm_value,
            learning_rate=lr,
            tokens=sum(b.num_tokens for b in batches),
            trained_tokens=trained,
            sum_squares=sum(b.sum_squares for b in batches),
            applied=applied,
            extras={name: value for name, value in zip(names, extras) if _finite(value)},
        )

    def _shares(self, batches: Sequence[Batch], weight: int) -> list[float]:
        """What each micro-batch's sum of losses is divided by."""
        if self.mean_of_means:
            means = len(batches) * self.engine.world.layout.data_ranks
            return [max(1, b.weight) * means for b in batches]
        return [max(1, weight)] * len(batches)


def _finite(value: float) -> bool:
    return value - value == 0.0
