"""Supervised fine-tuning, full or LoRA, with a teacher or without. Registered in recipes/__init__.py; all of it that is
not about a teacher is in stage.py and training.py."""

from __future__ import annotations

from pathlib import Path

from erniekit.config import RunConfig
from erniekit.data.tokenizer import Tokenizer
from erniekit.losses.distillation import METRICS, DistillationLoss
from erniekit.parallel.engine import Loss
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes import distillation
from erniekit.recipes.built import Built
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.run_plan import RunPlan, open_tokenizer
from erniekit.recipes.stage import Prepare, TrainingStage


class SFT(TrainingStage):
    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        return METRICS if cfg.distill.teacher_model_name_or_path else ()

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        if plan.config.distill.teacher_model_name_or_path:
            distillation.open_teacher(plan, tokenizer)  # refused before any row is read
        return super().open_data(plan, tokenizer, output)

    def loss(self, cfg: RunConfig, world: World, step_metrics: StepMetrics | None) -> Loss:
        if not cfg.distill.teacher_model_name_or_path:
            return super().loss(cfg, world, step_metrics)
        return DistillationLoss(cfg.memory.loss_subbatch_seqlen, step_metrics)

    def before_step(self, cfg: RunConfig, built: Built, data: TrainData) -> Prepare | None:
        if cfg.distill.teacher_model_name_or_path:
            distillation.install(cfg, built, distillation.open_teacher(built.plan, open_tokenizer(built.plan)))
        return super().before_step(cfg, built, data)


STAGE = SFT()
