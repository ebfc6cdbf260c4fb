"""The losses by name: `loss_type` of preference training, `token_loss` elsewhere. No torch: config/ reads it too.

The keys of PREFERENCE_LOSSES are the choices of `loss_type`, its facts decide config's rules and what is logged;
losses/dpo.py has one function under each name. Installed packages add to both: losses/own.py defines a token loss,
PAIR_ARGUMENTS what a preference loss is given.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

from erniekit.registry import Registry

CROSS_ENTROPY = "cross_entropy"
IN_SESSION = "python:"  # begins the name of a function that a Python session gave: only that session has it


class OwnLosses(Registry):
    """Names of installed packages; and those of Python sessions, so that a stored run can be read."""

    def __contains__(self, name: str) -> bool:
        return name.startswith(IN_SESSION) or super().__contains__(name)


TOKEN_LOSSES = OwnLosses("token loss", {CROSS_ENTROPY: ""}, group="erniekit.losses")


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


REFERENCE_ARGUMENTS = ("reference_chosen_logps", "reference_rejected_logps")
# By name, to a function of the user's, which returns the loss of each pair [n].
PAIR_ARGUMENTS = ("chosen_logps", "rejected_logps", *REFERENCE_ARGUMENTS, "score_delta", "beta")


def not_a_pair_loss(name: str, found: Any) -> str:
    """Why it cannot be a preference loss; empty where it can."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return "is no function that Python can read the parameters of"
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = next((word for word in needed if word not in PAIR_ARGUMENTS), None)
    if unknown is not None:
        return f"has the parameter {unknown!r}, which is not given to it: {', '.join(PAIR_ARGUMENTS)}"
    both = PAIR_ARGUMENTS[:2]
    return "" if set(both) <= set(needed) else f"must take {' and '.join(both)}"


PAIR_LOSSES = OwnLosses(
    "preference loss", dict.fromkeys(PREFERENCE_LOSSES, ""), group="erniekit.preference_losses", check=not_a_pair_loss
)


def pair_arguments(function: Any) -> tuple[str, ...]:
    """Those of PAIR_ARGUMENTS that a function takes."""
    return tuple(word for word in inspect.signature(function).parameters if word in PAIR_ARGUMENTS)


@cache
def preference_loss(loss_type: str) -> PreferenceLoss:
    """The facts of a loss. A package's takes a reference if a parameter of that name asks for it."""
    if loss_type in PREFERENCE_LOSSES:
        return PREFERENCE_LOSSES[loss_type]
    if loss_type.startswith(IN_SESSION):  # whether it takes a reference, the session says by reference_free
        return PreferenceLoss("of a Python session", logged_as=f"{loss_type.rpartition('.')[2]}_loss")
    wants = pair_arguments(PAIR_LOSSES.get(loss_type))
    return PreferenceLoss(
        f"of {PAIR_LOSSES.distribution(loss_type)}", needs_reference=any(w in REFERENCE_ARGUMENTS for w in wants)
    )


def metric_name(loss_type: str) -> str:
    """What a loss is logged as."""
    return preference_loss(loss_type).logged_as or f"{loss_type}_loss"
