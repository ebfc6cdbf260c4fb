"""The losses by name: `loss_type` of preference training, `token_loss` elsewhere. No torch: config/ reads it too.

The keys of PREFERENCE_LOSSES are the choices of `loss_type`, its facts decide config's rules and what is logged;
losses/dpo.py has one function under each name. losses/own.py defines a token loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.registry import Registry

CROSS_ENTROPY = "cross_entropy"
IN_SESSION = "python:"  # begins the name of a function that a Python session gave: only that session has it


class TokenLosses(Registry):
    """Names of installed packages; and those of Python sessions, so that a stored run can be read."""

    def __contains__(self, name: str) -> bool:
        return name.startswith(IN_SESSION) or super().__contains__(name)


TOKEN_LOSSES = TokenLosses("token loss", {CROSS_ENTROPY: ""}, group="erniekit.losses")


@dataclass(frozen=True)
class PreferenceLoss:
    what: str
    needs_reference: bool = True  # else a pair is measured only by the policy's log-probabilities
    per_token: bool = False  # takes means over an answer's tokens instead of sums
    sft_ratio: float | None = None  # the weight of the SFT term that belongs to it, whatever sft_loss_ratio is
    log_odds: bool = False  # log odds of the answers are logged as well
    logged_as: str = ""  # metric name; empty: <name>_loss


PREFERENCE_LOSSES = {
    "sigmoid": PreferenceLoss("DPO: log-sigmoid of the margin (arXiv 2305.18290)"),
    "hinge": PreferenceLoss("hinge on the margin (SLiC, arXiv 2305.10425)"),
    "simpo": PreferenceLoss(
        "log-sigmoid of the mean log-probabilities' margin less simpo_gamma (arXiv 2405.14734)",
        needs_reference=False,
        per_token=True,
    ),
    "ipo": PreferenceLoss("square of the margin less 1 / (2 beta) (arXiv 2310.12036)", per_token=True),
    "dpop": PreferenceLoss("DPO with a penalty where the chosen answer loses probability (arXiv 2402.13228)"),
    "kto_pair": PreferenceLoss("each answer against the mean of the other side (KTO, arXiv 2402.01306)"),
    "sppo_hard": PreferenceLoss("squares that pull the answers to +-1 / (2 beta) (arXiv 2405.00675)"),
    "nca_pair": PreferenceLoss("noise-contrastive alignment of pairs (arXiv 2402.05369)"),
    "or": PreferenceLoss("log-sigmoid of the log odds ratio", needs_reference=False, per_token=True, log_odds=True),
    "orpo": PreferenceLoss(
        "or with the SFT term (arXiv 2403.07691)",
        needs_reference=False,
        per_token=True,
        sft_ratio=1.0,
        log_odds=True,
        logged_as="or_loss",
    ),
}


# Of the keys of preference training, those that a stage other than DPO reads.
PREFERENCE_KEYS = {
    "KTO": (
        "beta", "desirable_weight", "undesirable_weight", "reference_logps", "mask_out_eos_token", "max_prompt_len",
    ),
    "RM": ("max_prompt_len",),
    "CLS": (),
}  # fmt: skip
# Of the keys of score heads, those that each stage with one reads.
SCORE_KEYS = {"RM": ("reward_margin", "center_rewards_coefficient"), "CLS": ("class_labels",)}
OF_KTO = ("desirable_weight", "undesirable_weight")  # which DPO has no use for


def metric_name(loss_type: str) -> str:
    """What a loss is logged as."""
    return PREFERENCE_LOSSES[loss_type].logged_as or f"{loss_type}_loss"
