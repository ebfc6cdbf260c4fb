"""KTO (arXiv 2402.01306): answers that are judged one by one, each against a baseline that all of a step share.

`kto_loss` is what train/step.py and evaluate.py call (recipes/kto.py binds its settings and measures the baseline
before the step); `kto_losses` is the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from erniekit.data.types import Batch
from erniekit.kernels.cross_entropy import CHUNK
from erniekit.losses.dpo import MetricsSink, SumOverRanks, answer_sums, share_of_copies


@dataclass(frozen=True)
class KtoSettings:
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected", "kto_loss", "kl",
)  # fmt: skip


def kto_losses(
    gained: torch.Tensor, desirable: torch.Tensor, baseline: torch.Tensor, settings: KtoSettings
) -> torch.Tensor:
    """gained [n]: log-probability of each answer less the reference's; baseline []: 0 or more."""
    side = torch.where(desirable, 1.0, -1.0).to(gained.dtype)
    weight = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight).to(gained.dtype)
    return weight * (1 - (settings.beta * side * (gained - baseline)).sigmoid())


def kto_loss(
    model: nn.Module,
    batch: Batch,
    hidden: torch.Tensor | None = None,
    *,
    settings: KtoSettings,
    step_metrics: MetricsSink | None = None,
    sum_over_cp: SumOverRanks | None = None,
    copies: int = 1,
    chunk: int = CHUNK,
    scale: float | None = None,
) -> torch.Tensor:
    """The SUM of the answers' losses (fp32), times scale. Arguments as dpo_loss's."""
    pairs = batch.pairs
    assert pairs is not None
    assert pairs.reference is not None, "the reference's log-probabilities come before the step"
    assert pairs.baseline is not None, "and so does the baseline"
    logps = answer_sums(model, batch, hidden, sum_over_cp, chunk)[0][0::2]
    gained, desirable = logps - pairs.reference[0::2].to(logps.device), pairs.score_delta > 0
    baseline = pairs.baseline.to(logps.device)
    losses = kto_losses(gained, desirable, baseline, settings)
    if step_metrics is not None:
        with torch.no_grad():
            _add_metrics(
                step_metrics, logps, settings.beta * gained, losses, desirable, baseline, pairs.count, settings
            )
    return share_of_copies(losses.sum(), scale, copies)


def _add_metrics(
    sink: MetricsSink,
    logps: torch.Tensor,
    rewards: torch.Tensor,
    losses: torch.Tensor,
    desirable: torch.Tensor,
    baseline: torch.Tensor,
    count: int,
    settings: KtoSettings,
) -> None:
    for name, chosen in (("chosen", desirable), ("rejected", ~desirable)):
        share = chosen.to(logps.dtype)
        sink.add(f"rewards/{name}", (rewards * share).sum(), share.sum())
        sink.add(f"logps/{name}", (logps * share).sum(), share.sum())
    right = (rewards > settings.beta * baseline) == desirable
    sink.add("rewards/accuracies", right.to(logps.dtype).sum(), count)
    sink.add("kto_loss", losses.sum(), count)
    sink.add("kl", baseline * count, count)
