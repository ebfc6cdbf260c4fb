"""A recipe's step as one rank of its full layout: built and run for shapes only, or for real on the device at hand.

Called by rehearse_command.py. The other ranks do not exist: rehearse/recorded_group.py answers for them. What they
read is made up (rehearsed_batches.py); weights are not read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from erniekit.checkpoint.model_folder import ModelFolder, read_json
from erniekit.config import RunConfig, for_world
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.errors import PlanError
from erniekit.lora.adapters_off import adapters_off
from erniekit.models import MODELS, score_head
from erniekit.models.init import generator_of
from erniekit.parallel.layout import Layout
from erniekit.parallel.memory import give_memory
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import sharding_of
from erniekit.parallel.world import check_named_islands
from erniekit.recipes import distillation, expert_layers, fp8_training, other_models, planning, stage_of
from erniekit.recipes.build import build
from erniekit.recipes.built import Built
from erniekit.recipes.dpo import sum_over_cp
from erniekit.recipes.kto import Baseline
from erniekit.recipes.model_config import changes_of
from erniekit.recipes.optimiser import make_optimizer
from erniekit.recipes.reference import Reference, frozen_copy
from erniekit.recipes.rehearsed_batches import batch_for, first_seen
from erniekit.recipes.run_plan import RunPlan, decide
from erniekit.recipes.schedule import make_schedule
from erniekit.recipes.score_heads import expected_labels
from erniekit.recipes.stage import Prepare, TrainingStage
from erniekit.rehearse.calls import Trace
from erniekit.rehearse.recorded_group import holds_values, opened
from erniekit.train.fp8_scales import StaticScales
from erniekit.train.step import TrainStep

STAGES = ("SFT", "PT", "DPO", "KTO", "RM", "CLS", "VL-SFT")


@dataclass(frozen=True)
class Rehearsal:
    """What every process that rehearses a rank needs to know."""

    config: RunConfig
    folder: Path  # with the model's config.json
    layout: Layout
    micro_batches: int
    timed: bool = False  # what is computed between calls is counted as well


def prepare(cfg: RunConfig, layout: Layout, folder: Path, micro_batches: int = 0) -> Rehearsal:
    """folder: an empty one; a released model's shape is written there where the recipe's own folder is not here.
    micro_batches 0: as many as show the schedule from its warm-up to its end."""
    if cfg.train.stage not in STAGES:
        raise PlanError(
            f"stage {cfg.train.stage} cannot be rehearsed at full size yet",
            where=cfg.origin("stage"),
            fix=f"erniekit train with max_steps=3; rehearsed are {', '.join(STAGES)}",
        )
    check_named_islands(cfg.parallel.islands, layout)
    cfg = for_world(cfg, layout.data_ranks)
    raw, own = planning.raw_shape(cfg)
    if cfg.train.stage == "VL-SFT" and not raw.get("vision_config"):
        raise PlanError(
            f"{cfg.model.model_name_or_path} does not see: its config has no vision_config",
            where=cfg.origin("model_name_or_path"),
            fix="stage: SFT, or a vision-language model, such as baidu/ERNIE-4.5-VL-28B-A3B-Paddle",
        )
    if own is None:
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    count = max(1, cfg.train.gradient_accumulation_steps)
    return Rehearsal(cfg, own or folder, layout, micro_batches or fewest(count, layout))


def fewest(count: int, layout: Layout) -> int:
    """Of `count` micro-batches as many as show a schedule's warm-up, its steady state and its end."""
    if layout.virtual_stages > 1:
        return min(count, layout.pp)  # they come in such groups
    return min(count, layout.pp + 1 if count >= layout.pp else 2)


def folder_of(rehearsal: Rehearsal) -> ModelFolder:
    path = rehearsal.folder
    cfg, raw = rehearsal.config, read_json(path / "config.json")
    labels = expected_labels(cfg, raw, str(path / "config.json"))
    head = score_head.changes(raw, labels) if labels else {}
    return ModelFolder(path, weights=False, changes=changes_of(cfg, path) | head)


def plan_for(rehearsal: Rehearsal, rank: int, device: Device) -> RunPlan:
    world = World(rehearsal.layout, rank, device.type)
    return decide(rehearsal.config, device, world, folder_of(rehearsal)).at_full_length()


def no_card() -> Device:
    """Stands for a card of the cluster, which may have more or less memory than this machine."""
    return replace(pick("cpu"), total_memory=0)


def shapes_of(rehearsal: Rehearsal) -> Callable[[int], Any]:
    """rank -> the shapes of the tensors it holds, and which micro-batches show it pictures: what tells kinds of ranks
    apart."""
    plan = plan_for(rehearsal, 0, no_card())
    whole = planning.built(plan.config, plan.folder.config, plan.folder.spec, plan.lora)
    sharding = sharding_of(whole, plan.folder.spec.plan, plan.world.layout)
    names, cfg, layout = sharding.names(), plan.config, plan.world.layout

    def shapes(rank: int) -> Any:
        held = tuple(sharding.local_shape(name, rank) for name in names if sharding.holds(name, rank))
        return held, first_seen(cfg, layout, rank)

    return shapes


def recorded(rehearsal: Rehearsal, rank: int) -> Trace:
    """All calls of a rank from its first group to the end of one step, at full size, without memory."""
    from erniekit.rehearse.shapes import shapes_only

    if not rehearsal.timed:
        with opened(rank, rehearsal.layout.size) as trace, shapes_only():
            one_step(built_for(rehearsal, rank, no_card()), rehearsal.micro_batches)
        return trace
    from erniekit.rehearse.counting import step_counted, streams_seen

    with opened(rank, rehearsal.layout.size) as trace, shapes_only(), streams_seen(trace):
        ready = built_for(rehearsal, rank, no_card())
        with step_counted(trace):
            one_step(ready, rehearsal.micro_batches)
    return trace


@dataclass(frozen=True)
class Measured:
    seconds: float  # of a step, without what ranks wait for each other
    peak: int  # bytes; 0 where the device does not count
    trace: Trace
    plan: RunPlan


def unreported(line: str) -> None:
    """Where the result is the only output."""


def measured(
    rehearsal: Rehearsal, rank: int, device: Device, steps: int = 3, report: Callable[[str], None] = unreported
) -> Measured:
    """The rank's own slice of model and step, for real, nothing sent. The first step is not counted: it compiles.
    report: gets a line after each part that takes long."""
    with opened(rank, rehearsal.layout.size) as trace:
        device.reset_peak()
        began = time.perf_counter()
        ready = built_for(rehearsal, rank, device)
        device.synchronise()
        more = "; its first step compiles" if ready.built.plan.config.model.compile else ""
        report(f"model    rank {rank}'s slice, built in {time.perf_counter() - began:.0f} s{more}")
        taken = []
        for number in range(steps + 1):
            began = time.perf_counter()
            one_step(ready, rehearsal.micro_batches)
            device.synchronise()
            taken.append(time.perf_counter() - began)
            if number == 0:
                report(f"step     the first one took {taken[0]:.0f} s; {steps} more are measured")
        peak = device.peak_allocated() if device.counts_memory else 0
        return Measured(sorted(taken[1:])[len(taken[1:]) // 2], peak, trace, ready.built.plan)


@dataclass(frozen=True)
class Ready:
    """A rank before its first step."""

    built: Built
    step: TrainStep
    scales: StaticScales | None  # of FP8 training


def built_for(rehearsal: Rehearsal, rank: int, device: Device) -> Ready:
    plan = plan_for(rehearsal, rank, device)
    cfg = plan.config
    built = build(plan, stage_of(cfg), fill=without_values)
    optimizer = make_optimizer(cfg, built)
    scales = fp8_training.scales_of(cfg, built, batch_for(plan, 0))
    means, prepare = cfg.compat.mean_of_micro_batch_means, prepare_other_models(built, stage_of(cfg))
    schedule = make_schedule(cfg, 10)
    step = TrainStep(built.engine, optimizer, schedule, cfg.optim.max_grad_norm, means, prepare=prepare)
    return Ready(built, step, scales)


def prepare_other_models(built: Built, stage: TrainingStage) -> Prepare | None:
    """The other models of a run, and what they compute before a step: a live reference, KTO's baseline, a teacher."""
    cfg = built.plan.config
    if (config := other_models.teacher_of(cfg)) is not None:
        spec = MODELS.get(config.family)
        with torch.device("meta"):
            teacher = spec.cast(spec.build(config), built.dtype)
        give_memory(teacher, built.device.handle)
        with torch.no_grad():
            for name, param in teacher.named_parameters():
                without_values(name, param)
        distillation.install_model(cfg, built, teacher)
    if not stage.compares(cfg):
        return None
    summed, chunk = sum_over_cp(built.world), cfg.memory.loss_subbatch_seqlen
    reference = Reference(built.engine, summed, chunk, partial(adapters_off, built.engine.parts))
    if other_models.live_copy(cfg):
        other = frozen_copy(built, stage, without_values)
        reference = Reference(other.engine, summed, chunk, own=other)
    reference.kept = cfg.dpo.reference_logps == "cached"
    return Baseline(reference, Reference(built.engine, summed, chunk)) if cfg.train.stage == "KTO" else reference


def without_values(name: str, piece: torch.Tensor) -> None:
    """Weights that need none: small ones, so that a real step stays finite. A tensor that every rank has whole is the
    same on all of them: routers then choose alike, and what ranks compute adds up to what one would."""
    generator = generator_of(name, 0, piece.device) if holds_values(piece) else None
    piece.fill_(1.0) if "norm" in name else piece.normal_(0, 0.02, generator=generator)


def one_step(ready: Ready, micro_batches: int) -> None:
    built = ready.built
    launched = ready.step.launch([batch_for(built.plan, number) for number in range(micro_batches)], 1)
    balance = expert_layers.balance_hook(built.plan.config, built)
    if balance is not None:
        balance.launched(None, launched)  # type: ignore[arg-type]
    if ready.scales is not None:
        ready.scales.after_update(launched.good)
    launched.result()
