"""STAGES: the `stage` value -> what it does differently. One line here adds a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.registry import Registry

if TYPE_CHECKING:
    from erniekit.config import RunConfig
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


def stage_of(cfg: RunConfig) -> TrainingStage:
    return STAGES.get(cfg.train.stage)
