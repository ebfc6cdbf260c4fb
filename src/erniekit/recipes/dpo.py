"""Preference training, full or LoRA, ten loss types. Registered in recipes/__init__.py; reference.py defines what the
policy is compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.probe import Probe, with_picture
from erniekit.config import RunConfig, need
from erniekit.data.preference import PairRules
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.data.vision.collate import VisionCollate
from erniekit.errors import ConfigError
from erniekit.losses.dpo import DpoSettings, dpo_loss, metric_names
from erniekit.losses.own_preference import PairLoss
from erniekit.parallel.collectives import sum_from
from erniekit.parallel.engine import Engine, Loss
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes.built import Built
from erniekit.recipes.check import Check
from erniekit.recipes.data_rows import DataRows
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.reference import Reference, RefreshReference, make_reference
from erniekit.recipes.repeat import write_unless_yours
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.stage import Prepare, TrainingStage, held_out
from erniekit.recipes.streaming import open_rows
from erniekit.recipes.vision_checks import picture_tokens, pixels_stay_inside
from erniekit.recipes.vision_data import proof_files, proof_lines
from erniekit.recipes.vision_features import no_feature_cache
from erniekit.recipes.vision_pairs import held_out_pairs, open_vision_pairs
from erniekit.train.evaluate import GoOn, evaluate_pairs
from erniekit.train.hooks import Hook
from erniekit.train.throughput import Throughput

TRAIN_ARGS = "dpo_train_args.json"


class DPO(TrainingStage):
    chats = False  # the doctor's checks of end tokens and templates read conversations
    perplexity = False

    def needs_base(self, cfg: RunConfig) -> bool:
        return super().needs_base(cfg) or self.compares(cfg)

    def compares(self, cfg: RunConfig) -> bool:
        return settings_of(cfg).needs_reference

    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        return metric_names(settings_of(cfg))

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        rules = pair_rules(plan.config)
        if plan.folder.config.vision is not None:
            if plan.config.data.streaming:
                raise ConfigError(
                    "pairs for a model that sees are packed by their patches, which are counted before training",
                    where=plan.config.origin("streaming"),
                    fix="leave streaming out",
                )
            return open_vision_pairs(plan, tokenizer, output, rules)
        return open_rows(plan, tokenizer, output, DataRows(rules))

    def held_out(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        bad_rows: BadRowsFile,
        world: World,
        model: ModelFolder | None = None,
    ) -> tuple[list[DataReport], Iterator[Batch]]:
        if model is not None and model.config.vision is not None:
            need(cfg, "eval_dataset_path")
            return held_out_pairs(cfg, tokenizer, bad_rows, world, pair_rules(cfg), model.path)
        return held_out(cfg, tokenizer, bad_rows, world, DataRows(pair_rules(cfg)))

    def probe(self, cfg: RunConfig, built: Built, first: Batch, tokenizer: Tokenizer) -> Probe:
        made = super().probe(cfg, built, first, tokenizer)
        return with_picture(made, picture_tokens(built, tokenizer)) if _sees(built) else made

    def extra_files(self, cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> dict[str, bytes]:
        return proof_files(cfg, data, tokenizer) if isinstance(data.collate, VisionCollate) else {}

    def proof_lines(self, folder: Path, tokenizer: Tokenizer) -> list[str]:
        return proof_lines(folder, tokenizer)

    def write_files(self, cfg: RunConfig, data: TrainData, output: Path) -> None:
        text = json.dumps(train_args(cfg, data), indent=2) + "\n"
        write_unless_yours(output / TRAIN_ARGS, text, "the size of this run is in run.json")

    def more_checks(self, built: Built, tokenizer: Tokenizer, first: Batch) -> list[Callable[[], Check]]:
        if not _sees(built):
            return []
        return [lambda: pixels_stay_inside(built, picture_tokens(built, tokenizer))]

    def loss(self, cfg: RunConfig, world: World, step_metrics: StepMetrics | None) -> Loss:
        return partial(
            dpo_loss,
            settings=settings_of(cfg, self.own_loss if isinstance(self.own_loss, PairLoss) else None),
            step_metrics=step_metrics,
            sum_over_cp=sum_over_cp(world),
            copies=world.layout.cp,
            chunk=cfg.memory.loss_subbatch_seqlen,
        )

    def before_step(self, cfg: RunConfig, built: Built, data: TrainData) -> Prepare | None:
        if _sees(built):
            no_feature_cache(cfg, built, "stage DPO keeps no features")
        if not self.compares(cfg):
            return None
        return make_reference(cfg, built, data, self, sum_over_cp(built.world))

    def hooks(self, cfg: RunConfig, built: Built, prepare: Prepare | None) -> list[Hook]:
        every = cfg.dpo.ref_model_update_steps
        out: list[Hook] = []
        if every > 0 and isinstance(prepare, Reference) and prepare.own is not None:
            out.append(RefreshReference(prepare.own, built, every, Path(cfg.train.output_dir or "output").expanduser()))
        return [*out, Throughput(built.world)] if cfg.dpo.dpo_benchmark else out

    def evaluate(
        self,
        cfg: RunConfig,
        engine: Engine,
        batches: Iterable[Batch],
        prepare: Prepare | None = None,
        go_on: GoOn | None = None,
    ) -> dict[str, float]:
        most, batch_means = cfg.train.max_evaluate_steps, cfg.compat.eval_mean_of_batch_means
        return evaluate_pairs(engine, batches, prepare, most, batch_means, go_on)


def _sees(built: Built) -> bool:
    return built.folder.config.vision is not None


def pair_rules(cfg: RunConfig) -> PairRules:
    return PairRules(cfg.dpo.max_prompt_len, cfg.dpo.mask_out_eos_token)


def train_args(cfg: RunConfig, data: TrainData) -> dict[str, Any]:
    """What ERNIEKit's scripts look up about a run: its size, under their names."""
    p, samples = cfg.parallel, sum(len(source) for source in data.sources)
    return {
        "num_train_epochs": cfg.train.num_train_epochs,
        "max_steps": data.max_steps,
        "train_tokens": sum(source.report.tokens for source in data.sources),
        "train_samples": samples,
        "global_batch_size": data.packs_per_step,
        "gradient_accumulation_steps": data.accumulation,
        "per_device_train_batch_size": cfg.train.per_device_train_batch_size,
        "warmup_steps": cfg.optim.warmup_steps,
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "pipeline_parallel_degree": p.pipeline_parallel_degree,
        "sharding_parallel_degree": p.sharding_parallel_degree,
        "seed": cfg.train.seed,
        "num_samples_each_epoch": cfg.data.num_samples_each_epoch,
        "max_seq_len": cfg.data.max_seq_len,
        "valid": samples > 0,
    }


def settings_of(cfg: RunConfig, own: PairLoss | None = None) -> DpoSettings:
    d = cfg.dpo
    return DpoSettings(
        d.loss_type,
        d.beta,
        d.label_smoothing,
        d.pref_loss_ratio,
        d.sft_loss_ratio,
        d.offset_alpha,
        d.simpo_gamma,
        d.dpop_lambda,
        d.normalize_logps,
        d.reference_free,
        batch_means=cfg.compat.dpo_batch_means,
        own=own,
    )


def sum_over_cp(world: World) -> Callable[[torch.Tensor], torch.Tensor] | None:
    group = world.group("cp")
    return None if group is None else lambda sums: sum_from(sums, group)


STAGE = DPO()
