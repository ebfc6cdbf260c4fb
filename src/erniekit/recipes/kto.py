"""KTO: answers that are judged one by one, full or LoRA. Registered in recipes/__init__.py; the reference is DPO's.

Before each step the policy and the reference measure every prompt with another row's answer, without gradient. The mean
of what the policy gives more, over all micro-batches and ranks of the step and at least 0, is the baseline of the loss:
any cut into micro-batches and any layout give the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.data.unpaired_collate import collate_unpaired
from erniekit.data.unpaired_source import unpaired_rows
from erniekit.errors import ConfigError
from erniekit.losses.kto import METRICS, KtoSettings, kto_loss
from erniekit.parallel.engine import Engine, Loss
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes.built import Built
from erniekit.recipes.data_rows import DataRows
from erniekit.recipes.datasets import TrainData, open_data
from erniekit.recipes.dpo import pair_rules, sum_over_cp
from erniekit.recipes.reference import Reference, make_reference
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.stage import Prepare, TrainingStage, held_out
from erniekit.train.evaluate import GoOn, evaluate_pairs
from erniekit.train.hooks import Hook


class KTO(TrainingStage):
    chats = False  # the doctor's checks of end tokens and templates read conversations
    perplexity = False

    def needs_base(self, cfg: RunConfig) -> bool:
        return True

    def compares(self, cfg: RunConfig) -> bool:
        return True

    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        return METRICS

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        if plan.folder.config.vision is not None:
            raise ConfigError(
                "stage KTO reads text; this is a vision-language model",
                where=str(plan.folder.path),
                fix="stage: DPO compares answers about pictures",
            )
        return open_data(plan, tokenizer, output, rows_of(plan.config))

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
        return partial(
            kto_loss,
            settings=KtoSettings(cfg.dpo.beta, cfg.dpo.desirable_weight, cfg.dpo.undesirable_weight),
            step_metrics=step_metrics,
            sum_over_cp=sum_over_cp(world),
            copies=world.layout.cp,
            chunk=cfg.memory.loss_subbatch_seqlen,
        )

    def before_step(self, cfg: RunConfig, built: Built, data: TrainData) -> Prepare:
        summed = sum_over_cp(built.world)
        policy = Reference(built.engine, summed, cfg.memory.loss_subbatch_seqlen)
        return Baseline(make_reference(cfg, built, data, self, summed), policy)

    def prepare_evaluation(self, cfg: RunConfig, engine: Engine, reference: Prepare) -> Prepare:
        assert isinstance(reference, Reference)
        return Baseline(reference, Reference(engine, None, cfg.memory.loss_subbatch_seqlen))

    def hooks(self, cfg: RunConfig, built: Built, prepare: Prepare | None) -> list[Hook]:
        return []

    def evaluate(
        self,
        cfg: RunConfig,
        engine: Engine,
        batches: Iterable[Batch],
        prepare: Prepare | None = None,
        go_on: GoOn | None = None,
    ) -> dict[str, float]:
        return evaluate_pairs(engine, batches, prepare, cfg.train.max_evaluate_steps, go_on=go_on, unit="answers")


class Baseline(Reference):
    """Fills in the reference's log-probability of each answer, and the baseline that all answers of a step share."""

    def __init__(self, reference: Reference, policy: Reference) -> None:
        """policy: measures with the weights of the moment."""
        self.engine, self.off, self.own, self.kept = reference.engine, reference.off, reference.own, reference.kept
        self._measure = reference._measure
        self.policy = policy

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        batches = super().__call__(batches)
        gains = torch.zeros(2, dtype=torch.float64, device=self.policy.engine.device)
        for batch in batches:
            assert batch.pairs is not None
            assert batch.mismatched is not None
            assert batch.pairs.reference is not None
            log_probs = self.policy.log_probs(batch.mismatched)[1::2]
            gains[0] += (log_probs - batch.pairs.reference[1::2].to(log_probs.device)).double().sum()
            gains[1] += batch.pairs.count
        gains = self.policy.engine.sum_losses(gains)
        baseline = (gains[0] / gains[1].clamp(min=1)).clamp(min=0).float()
        return [replace(b, pairs=replace(b.pairs, baseline=baseline)) for b in batches if b.pairs is not None]


def rows_of(cfg: RunConfig) -> DataRows:
    return DataRows(pair_rules(cfg), collate_unpaired, unpaired_rows)


STAGE = KTO()
