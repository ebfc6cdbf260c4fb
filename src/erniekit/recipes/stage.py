"""TrainingStage: what differs between SFT, DPO and pre-training; the base class is SFT's answer to every question.

training.py, build.py and doctor.py call it; sft.py, dpo.py and pretrain.py implement it. One subclass and one line in
recipes/__init__.py add a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.probe import Probe, probe_from
from erniekit.config import RunConfig, need
from erniekit.data.collate import collate
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.losses.causal import causal_loss
from erniekit.losses.own import TokenLoss
from erniekit.losses.own_preference import PairLoss
from erniekit.parallel.engine import Engine, Loss
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes.built import Built
from erniekit.recipes.check import Check
from erniekit.recipes.data_rows import DataRows
from erniekit.recipes.datasets import TrainData, eval_batches, sources_for
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.served_prompts import Compared, first_prompts
from erniekit.recipes.streaming import open_rows
from erniekit.train.evaluate import GoOn, evaluate
from erniekit.train.hooks import Hook
from erniekit.train.throughput import Throughput

Prepare = Callable[[Sequence[Batch]], Sequence[Batch]]


class TrainingStage:
    chats = True  # rows are conversations: the doctor looks at end tokens and at the chat template
    perplexity = True  # the loss is a mean over tokens
    labels_are_tokens = True  # what a batch's labels hold
    own_loss: TokenLoss | PairLoss | None = None  # of the user: what a trained token or a pair costs (own_loss.py)

    def separates_documents(self, cfg: RunConfig) -> bool:
        """Whether documents that share a row must not attend to each other."""
        return True

    def needs_base(self, cfg: RunConfig) -> bool:
        """Whether a step's numbers depend on the model the run began with, and not only on what a checkpoint holds."""
        return bool(cfg.lora.lora)

    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        """What its loss adds to the step metrics."""
        return ()

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        return open_rows(plan, tokenizer, output)

    def held_out(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        bad_rows: BadRowsFile,
        world: World,
        model: ModelFolder | None = None,
    ) -> tuple[list[DataReport], Iterator[Batch]]:
        """What `erniekit eval` reads: a report of each source, and one pass over all of them. model: whose answers are
        evaluated; an adapter's is its base."""
        return held_out(cfg, tokenizer, bad_rows, world)

    def prompts(self, cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> Compared | None:
        """The first prompt as a server will send it and as training begins it; None: no conversation to compare."""
        return first_prompts(cfg, data, tokenizer)

    def probe(self, cfg: RunConfig, built: Built, first: Batch, tokenizer: Tokenizer) -> Probe:
        """The probe that checkpoints run when they are saved, read and exported."""
        return probe_from(first, cfg.checkpoint.probe_tokens)

    def extra_files(self, cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Small files of each checkpoint, by name."""
        return {}

    def proof_lines(self, folder: Path, tokenizer: Tokenizer) -> list[str]:
        """What a trained folder's own files prove before it is evaluated."""
        return []

    def more_checks(self, built: Built, tokenizer: Tokenizer, first: Batch) -> list[Callable[[], Check]]:
        """Of the doctor, besides those of every stage."""
        return []

    def picture_lines(self, built: Built, data: TrainData) -> list[str]:
        """Of the sample that the doctor shows: its pictures, as the model sees them."""
        return []

    def write_files(self, cfg: RunConfig, data: TrainData, output: Path) -> None:
        """What only this stage leaves in the run's folder. Called on one rank, once nothing refuses the run."""

    def loss(self, cfg: RunConfig, world: World, step_metrics: StepMetrics | None) -> Loss:
        """(model, batch, hidden states or nothing) -> the SUM over the batch; the step divides by batch.weight."""

        def loss(
            model: nn.Module, batch: Batch, hidden: torch.Tensor | None = None, scale: float | None = None
        ) -> torch.Tensor:
            return causal_loss(model, batch, hidden, cfg.memory.loss_subbatch_seqlen, scale)

        return loss

    def before_step(self, cfg: RunConfig, built: Built, data: TrainData) -> Prepare | None:
        """What must be known of a step's micro-batches before their forward pass; None: nothing. Asked while the model
        still has the weights it starts from."""
        return None

    def compares(self, cfg: RunConfig) -> bool:
        """Whether answers are measured against a reference model."""
        return False

    def prepare_evaluation(self, cfg: RunConfig, engine: Engine, reference: Prepare) -> Prepare:
        """For `erniekit eval`, what `before_step` is for training; reference: fills in a reference's view."""
        return reference

    def hooks(self, cfg: RunConfig, built: Built, prepare: Prepare | None) -> list[Hook]:
        return [Throughput(built.world)] if cfg.train.sft_benchmark else []

    def evaluate(
        self,
        cfg: RunConfig,
        engine: Engine,
        batches: Iterable[Batch],
        prepare: Prepare | None = None,
        go_on: GoOn | None = None,
    ) -> dict[str, float]:
        """prepare: what `before_step` gave, for each batch. go_on: called before each batch (train/evaluate.py)."""
        if prepare is not None:
            batches = (batch for one in batches for batch in prepare([one]))
        most, batch_means = cfg.train.max_evaluate_steps, cfg.compat.eval_mean_of_batch_means
        metrics = evaluate(engine, batches, most, batch_means, go_on)
        return {name: value for name, value in metrics.items() if self.perplexity or name != "eval_ppl"}


def held_out(
    cfg: RunConfig, tokenizer: Tokenizer, bad_rows: BadRowsFile, world: World, rows: DataRows | None = None
) -> tuple[list[DataReport], Iterator[Batch]]:
    """The evaluation files: a report of each, and one pass over all of them. rows: None for conversations."""
    need(cfg, "eval_dataset_path")
    sources = sources_for(cfg, "eval", tokenizer, bad_rows, rows)
    made = collate if rows is None else rows.collate
    return [s.report for s in sources], eval_batches(cfg, sources, world, {"pad_id": tokenizer.pad_id or 0}, made)
