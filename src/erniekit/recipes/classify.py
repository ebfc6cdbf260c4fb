"""Classification of texts: cross-entropy on a score head. Registered in recipes/__init__.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, need
from erniekit.data.classification import class_rows
from erniekit.data.collate import collate
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.losses.scores import CLASS_METRICS, class_loss
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


class Classifier(ScoringStage):
    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        return CLASS_METRICS

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        return open_rows(plan, tokenizer, output, rows_of(plan.folder.config.labels))

    def held_out(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        bad_rows: BadRowsFile,
        world: World,
        model: ModelFolder | None = None,
    ) -> tuple[list[DataReport], Iterator[Batch]]:
        """The classes are those of the model that is evaluated."""
        need(cfg, "eval_dataset_path")
        assert model is not None
        classes = model.config.labels
        return held_out(cfg, tokenizer, bad_rows, world, rows_of(classes))

    def loss(self, cfg: RunConfig, world: World, step_metrics: StepMetrics | None) -> Loss:
        return partial(class_loss, step_metrics=step_metrics)

    def evaluate(
        self,
        cfg: RunConfig,
        engine: Engine,
        batches: Iterable[Batch],
        prepare: Prepare | None = None,
        go_on: GoOn | None = None,
    ) -> dict[str, float]:
        return evaluate_pairs(engine, batches, None, cfg.train.max_evaluate_steps, go_on=go_on, unit="rows")


def rows_of(classes: tuple[str, ...]) -> DataRows:
    return DataRows(None, collate, class_rows(classes))


STAGE = Classifier()
