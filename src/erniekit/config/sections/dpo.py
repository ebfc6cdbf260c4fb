"""Preference training. Declared for the recipes that carry it; stage DPO is refused by name today (later.py)."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key

_DPO = "DPO"


@dataclass(frozen=True)
class DpoSection:
    beta: float = key(0.1, "Strength of the reference.", low=0, fixed=True, later=_DPO)
    loss_type: str = key(
        "sigmoid",
        "Preference loss.",
        choices=("sigmoid", "hinge", "simpo", "ipo", "dpop", "kto_pair", "sppo_hard", "nca_pair", "or", "orpo"),
        fixed=True,
        later=_DPO,
    )
    label_smoothing: float = key(0.0, "Share of pairs taken as swapped.", low=0, high=1, fixed=True, later=_DPO)
    pref_loss_ratio: float = key(1.0, "Weight of the preference loss.", low=0, fixed=True, later=_DPO)
    sft_loss_ratio: float = key(0.0, "Weight of the loss on chosen answers.", low=0, fixed=True, later=_DPO)
    offset_alpha: float = key(0.0, "Margin by score difference.", fixed=True, later=_DPO)
    simpo_gamma: float = key(0.5, "Margin of simpo.", fixed=True, later=_DPO)
    dpop_lambda: float = key(50.0, "Weight of dpop's penalty.", fixed=True, later=_DPO)
    normalize_logps: bool = key(True, "Even out the lengths of a pair.", fixed=True, later=_DPO)
    reference_free: bool = key(False, "No reference model.", fixed=True, later=_DPO)
    ref_model_update_steps: int = key(-1, "Copy the policy to the reference every N steps.", later=_DPO)
    mask_out_eos_token: bool = key(True, "Leave the end token out of log-probabilities.", fixed=True, later=_DPO)
    max_prompt_len: int = key(2048, "Longest prompt.", low=1, fixed=True, later=_DPO)
    dpo_benchmark: bool = key(False, "Train without saving and print tokens/s.", later=_DPO)
