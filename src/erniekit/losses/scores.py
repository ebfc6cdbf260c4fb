"""Losses on a score head: pairs of answers for a reward model (Bradley-Terry), classes of sequences.

recipes/reward.py and classify.py bind them; train/step.py and evaluate.py call them. The scores of a sequence are those
at its last token, which the data marks by the only label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.data.types import IGNORE, Batch
from erniekit.losses.dpo import MetricsSink

REWARD_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
CLASS_METRICS = ("accuracy",)


@dataclass(frozen=True)
class RewardSettings:
    margin: float = 0.0  # times a pair's score difference
    centre: float = 0.0  # of the squared sum of a pair's rewards


def reward_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, score_delta: torch.Tensor, settings: RewardSettings
) -> torch.Tensor:
    """[pairs]: -log sigmoid(chosen - rejected - margin), and the centring term."""
    losses = -F.logsigmoid(chosen - rejected - settings.margin * score_delta)
    return losses + settings.centre * (chosen + rejected) ** 2 if settings.centre else losses


def reward_loss(
    model: nn.Module,
    batch: Batch,
    hidden: torch.Tensor | None = None,
    *,
    settings: RewardSettings,
    step_metrics: MetricsSink | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The SUM of the pairs' losses (fp32), times scale."""
    pairs = batch.pairs
    assert pairs is not None
    places = (pairs.segment.flatten() >= 0).nonzero().squeeze(1)
    rewards = scores_of(model, batch, hidden).squeeze(-1).index_select(0, places)
    chosen, rejected = rewards[0::2], rewards[1::2]  # a row's segments come in their order
    losses = reward_losses(chosen, rejected, pairs.score_delta.to(chosen.device), settings)
    if step_metrics is not None:
        with torch.no_grad():
            metrics = (chosen, rejected, (chosen > rejected).float(), chosen - rejected)
            for name, values in zip(REWARD_METRICS, metrics):
                step_metrics.add(name, values.sum(), pairs.count)
    total = losses.sum()
    return total if scale is None else total * scale


def class_loss(
    model: nn.Module,
    batch: Batch,
    hidden: torch.Tensor | None = None,
    *,
    step_metrics: MetricsSink | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The SUM of the sequences' cross-entropies (fp32), times scale."""
    labels = batch.labels.flatten()
    places = (labels != IGNORE).nonzero().squeeze(1)
    scores, targets = scores_of(model, batch, hidden).index_select(0, places), labels[places]
    if step_metrics is not None:
        right = (scores.detach().argmax(-1) == targets).float()
        step_metrics.add("accuracy", right.sum(), batch.num_label_tokens)
    total = F.cross_entropy(scores, targets, reduction="sum")
    return total if scale is None else total * scale


def scores_of(model: nn.Module, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [B * L, classes]. All places are scored: a head of a few rows costs nothing compared to the layers."""
    out: torch.Tensor = model(
        batch.input_ids if hidden is None else hidden,
        batch.positions,
        batch.documents(),
        batch.max_doc,
        more=batch.more(),
    )
    return out.flatten(0, 1).float()
