"""A reward model from preference rows: pairwise Bradley-Terry on a score head. Registered in recipes/__init__.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.data.preference import PairRules
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.reward import reward_rows
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.losses.scores import REWARD_METRICS, RewardSettings, reward_loss
from erniekit.parallel.engine import Engine, Loss
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes.data_rows import DataRows
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.scoring import ScoringStage
from erniekit.recipes.stage import Prepare, held_out
from erniekit.recipes.streaming import open_rows
from erniekit.train.evaluate import GoOn, evaluate_pairs


class RewardModel(ScoringStage):
    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        return REWARD_METRICS

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        return open_rows(plan, tokenizer, output, rows_of(plan.config))

    def held_out(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        bad_rows: BadRowsFile,
        world: World,
        model: ModelFolder | None = None,
    ) -> tuple[list[DataReport], Iterator[Batch]]:
        return held_out(cfg, tokenizer, bad_rows, world, rows_of(cfg))

    def loss(self, cfg: RunConfig, world: World, step_metrics: StepMetrics | None) -> Loss:
        settings = RewardSettings(cfg.score.reward_margin, cfg.score.center_rewards_coefficient)
        return partial(reward_loss, settings=settings, step_metrics=step_metrics)

    def evaluate(
        self,
        cfg: RunConfig,
        engine: Engine,
        batches: Iterable[Batch],
        prepare: Prepare | None = None,
        go_on: GoOn | None = None,
    ) -> dict[str, float]:
        return evaluate_pairs(engine, batches, None, cfg.train.max_evaluate_steps, go_on=go_on)


def rows_of(cfg: RunConfig) -> DataRows:
    # What an answer's tokens score does not matter here; its last one is read whatever it is.
    return DataRows(PairRules(cfg.dpo.max_prompt_len, mask_out_eos_token=False), collate_pairs, reward_rows)


STAGE = RewardModel()
