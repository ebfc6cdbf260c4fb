"""Preference losses straight from sums of log-probabilities, without a model and a batch."""

from __future__ import annotations

import torch

from erniekit.losses.dpo import Answers, DpoSettings, even_lengths, preference_losses


def dpo_losses(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor | None,
    ref_rejected: torch.Tensor | None,
    settings: DpoSettings,
    lengths: Answers,
    score_delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """From sums of log-probabilities [pairs] to the preference losses [pairs], before pref_loss_ratio."""
    policy = even_lengths(Answers(policy_chosen, policy_rejected), lengths, settings)
    reference = None
    if ref_chosen is not None and ref_rejected is not None:
        reference = even_lengths(Answers(ref_chosen, ref_rejected), lengths, settings)
    return preference_losses(policy, reference, settings, score_delta)
