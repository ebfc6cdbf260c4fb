"""The metrics of an evaluation, by stage, and which direction is better. Read by rules/schedule.py.

Kept here because `config` imports no torch: tests compare it with train/evaluate.py and losses/dpo.py.
"""

from __future__ import annotations

from erniekit.loss_table import metric_name, preference_loss

PREFIX = "eval_"


GENERATED = {"exact_match": True, "similarity": True}  # of the answers of eval_generate


def metrics_of(stage: str, loss_type: str, generates: bool = False) -> dict[str, bool]:
    """Name without `eval_` -> whether more of it is better."""
    return {**_metrics_of(stage, loss_type), **(GENERATED if generates else {})}


def _metrics_of(stage: str, loss_type: str) -> dict[str, bool]:
    rewards = {f"rewards/{name}": name != "rejected" for name in ("chosen", "rejected", "accuracies", "margins")}
    if stage == "RM":
        return {"loss": False, **rewards}
    if stage == "CLS":
        return {"loss": False, "accuracy": True}
    if stage == "KTO":
        better = {"rewards/chosen": True, "rewards/rejected": False, "rewards/accuracies": True}
        return {"loss": False, "kto_loss": False, **better, "logps/chosen": True, "logps/rejected": False, "kl": False}
    if stage != "DPO":
        return {"loss": False, "ppl": False}
    out = {
        "loss": False,
        metric_name(loss_type): False,
        "sft_loss": False,
        "rewards/chosen": True,
        "rewards/rejected": False,
        "rewards/accuracies": True,
        "rewards/margins": True,
        "logps/chosen": True,
        "logps/rejected": False,
    }
    return {**out, "log_odds_ratio": True, "log_odds_chosen": True} if preference_loss(loss_type).log_odds else out
