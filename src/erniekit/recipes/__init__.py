"""STAGES: the `stage` value -> what it does differently. One line here adds a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.loss_table import CROSS_ENTROPY, PREFERENCE_LOSSES
from erniekit.registry import Registry

if TYPE_CHECKING:
    from erniekit.config import RunConfig
    from erniekit.recipes.own_loss import OwnLoss
    from erniekit.recipes.stage import TrainingStage

STAGES = Registry(
    "stage",
    {
        "SFT": "erniekit.recipes.sft:STAGE",
        "DPO": "erniekit.recipes.dpo:STAGE",
        "KTO": "erniekit.recipes.kto:STAGE",
        "RM": "erniekit.recipes.reward:STAGE",
        "CLS": "erniekit.recipes.classify:STAGE",
        "PT": "erniekit.recipes.pretrain:STAGE",
        "VL-SFT": "erniekit.recipes.vl_sft:STAGE",
    },
)


def stage_of(cfg: RunConfig, loss: OwnLoss | None = None) -> TrainingStage:
    """loss: a Python session's own; else what `token_loss` names, or `loss_type` in stage DPO."""
    stage: TrainingStage = STAGES.get(cfg.train.stage)
    pairs = cfg.train.stage == "DPO" and cfg.dpo.loss_type not in PREFERENCE_LOSSES
    if loss is None and cfg.train.token_loss == CROSS_ENTROPY and not pairs:
        return stage
    from erniekit.recipes.own_loss import find_loss, with_loss

    return with_loss(stage, cfg, loss or find_loss(cfg))
