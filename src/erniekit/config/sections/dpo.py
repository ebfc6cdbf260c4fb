"""Preference training. Read by recipes/dpo.py, kto.py and reward.py."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.loss_table import PAIR_LOSSES, PREFERENCE_LOSSES


@dataclass(frozen=True)
class DpoSection:
    beta: float = key(0.1, "DPO beta: strength of the KL constraint to the reference model.", low=0, fixed=True)
    loss_type: str = key(
        "sigmoid",
        "Preference loss.",
        choices=tuple(PREFERENCE_LOSSES),
        further=PAIR_LOSSES,
        fixed=True,
    )
    label_smoothing: float = key(0.0, "Assumed share of pairs with swapped preference.", low=0, high=1, fixed=True)
    pref_loss_ratio: float = key(1.0, "Weight of the preference loss.", low=0, fixed=True)
    sft_loss_ratio: float = key(0.0, "Weight of the loss on chosen answers.", low=0, fixed=True)
    offset_alpha: float = key(0.0, "Margin in proportion to the pair's score difference.", fixed=True)
    simpo_gamma: float = key(0.5, "Margin of simpo.", fixed=True)
    dpop_lambda: float = key(50.0, "Weight of dpop's penalty.", fixed=True)
    normalize_logps: bool = key(
        True, "Scale log-probabilities by length, so that pairs of unlike lengths compare.", fixed=True
    )
    reference_free: bool = key(False, "Train without a reference model.", fixed=True)
    reference_logps: str = key(
        "live",
        "Log-probabilities of the reference: live in every step, or cached: computed once before the first and kept.",
        choices=("live", "cached"),
    )
    ref_model_update_steps: int = key(-1, "Copy the policy to the reference every N steps.", fixed=True)
    mask_out_eos_token: bool = key(True, "Leave the end token out of log-probabilities.", fixed=True)
    max_prompt_len: int = key(2048, "Longest prompt.", low=1, fixed=True)
    desirable_weight: float = key(
        1.0, "KTO: weight of desirable answers.", also=("kto_chosen_weight",), low=0, fixed=True
    )
    undesirable_weight: float = key(
        1.0, "KTO: weight of undesirable answers.", also=("kto_rejected_weight",), low=0, fixed=True
    )
    dpo_benchmark: bool = key(False, "Train without evaluation or intermediate checkpoints; print tokens/s at the end.")
