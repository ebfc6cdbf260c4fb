"""`erniekit eval`: a base model, an adapter or a run's newest checkpoint on a dataset: loss and perplexity, or for
stage DPO preference loss, accuracy and rewards."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from torch import nn

from erniekit.api_load import Found, find_model
from erniekit.config import RunConfig, need
from erniekit.config.note import Note
from erniekit.data.report import BadRowsFile, total_lines
from erniekit.data.vision.proof_file import warn_of_other_rules
from erniekit.devices.base import Device
from erniekit.export.vision_rules import vision_rules
from erniekit.log import emit, paint, typed
from erniekit.lora.adapters_off import adapters_off
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.printable import counted
from erniekit.recipes import own_loss, stage_of
from erniekit.recipes.eval_folder import results_folder, what_to_evaluate, write_evaluation
from erniekit.recipes.expert_layers import ignore_bias
from erniekit.recipes.reference import Reference
from erniekit.recipes.run_plan import open_device, packed_as
from erniekit.recipes.score_heads import check_head
from erniekit.recipes.stage import TrainingStage
from erniekit.result import RunResult
from erniekit.train.guard import NotFinite
from erniekit.weight_kinds import BF16


def evaluate_run(cfg: RunConfig) -> RunResult:
    packed = packed_as(cfg)
    opened = open_device(cfg)
    cfg, device, dtype = opened.config, opened.device, opened.dtype
    source, base, trained = what_to_evaluate(cfg)
    found = find_model(source, base, cfg.model.download_hub, cfg.lora.override_base, cfg.checkpoint.verify)
    emit(f"model    {source}" + (" (the result of a run)" if trained else ""))
    if found.weights.config.vision is not None and not cfg.given("stage"):
        emit("note     stage: VL-SFT (the model sees pictures)")
        cfg = cfg.derive(Note("stage", cfg.train.stage, "VL-SFT", "the model sees pictures"))
    tokenizer, stage = found.tokenizer(cfg.model.tokenizer_name), stage_of(cfg)
    if cfg["eval_generate"]:
        emit("note     eval_generate: without effect here; answers are generated in evaluations during training")
    check_head(cfg, found.weights.config.labels, found.describe())
    for line in stage.proof_lines(Path(source).expanduser(), tokenizer):
        emit(f"checked  {line}")
    if found.weights.config.vision is not None:
        warn_of_other_rules(found.trained, vision_rules(cfg, found.weights.path))
    world = World(device_type=device.type)
    with results_folder(cfg, source, trained) as output:
        reports, batches = stage.held_out(
            cfg, tokenizer, BadRowsFile(output / "bad_eval_rows.jsonl"), world, found.weights
        )
        for line in [line for report in reports for line in report.lines()] + total_lines(reports):
            emit(f"eval     {line}")
        engine = engine_for(cfg, stage, found, world, device, dtype, packed)
        prepare = None
        if stage.compares(cfg):
            reference = reference_for(cfg, stage, found, engine, device, dtype, packed)
            prepare = stage.prepare_evaluation(cfg, engine, reference)
        metrics = stage.evaluate(cfg, engine, batches, prepare)
        require_numbers(metrics, found)
        written = write_evaluation(output, source, metrics)
    emit(f"{paint('done', 'green', 'bold')}     {summary_of(metrics)} in {metrics['eval_runtime']:.1f} s")
    emit(f"result   {written}")
    if not found.weights.config.labels:
        emit(f"next     {typed('chat', source)}")
    return RunResult(output, metrics)


def require_numbers(metrics: dict[str, float], found: Found) -> None:
    """A NaN loss is an error: no results file is written, so that no table of results takes it for a measurement."""
    if not math.isfinite(metrics["eval_loss"]):
        raise NotFinite(
            f"the loss of this model is not a number: {metrics['eval_loss']}",
            where=found.describe(),
            fix="its weights are damaged, or training diverged: evaluate another checkpoint of the "
            "run, or the model it was trained from; if only compute_type: fp16 or bf16 gives this, compute_type=fp32",
        )


def engine_for(
    cfg: RunConfig,
    stage: TrainingStage,
    found: Found,
    world: World,
    device: Device,
    dtype: torch.dtype,
    packed: str = BF16,
) -> Engine:
    model: nn.Module = found.build(dtype, device.handle, packed)
    ignore_bias(cfg, model)
    names = stage.metric_names(cfg)
    step_metrics = StepMetrics(names, device.handle) if names else None
    engine = Engine([(0, model)], world, device, stage.loss(cfg, world, step_metrics), dtype=dtype)
    own_loss.install(stage.own_loss, engine, cfg)
    engine.step_metrics = step_metrics
    return engine


def reference_for(
    cfg: RunConfig,
    stage: TrainingStage,
    found: Found,
    engine: Engine,
    device: Device,
    dtype: torch.dtype,
    packed: str = BF16,
) -> Reference:
    """To whom the model is compared: itself without its adapters, or model_name_or_path."""
    chunk = cfg.memory.loss_subbatch_seqlen
    if found.adapter is not None:
        emit("reference the model without its adapters")
        return Reference(engine, None, chunk, partial(adapters_off, engine.parts))
    need(cfg, "model_name_or_path")
    base = find_model(str(cfg.model.model_name_or_path), hub=cfg.model.download_hub, verify=cfg.checkpoint.verify)
    same = base.adapter is None and base.weights.path.resolve() == found.weights.path.resolve()
    emit(f"reference {base.describe()}" + (": the model itself, so all rewards are 0" if same else ""))
    other = engine if same else engine_for(cfg, stage, base, engine.world, device, dtype, packed)
    return Reference(other, None, chunk)


def summary_of(metrics: dict[str, float]) -> str:
    loss = f"eval_loss {metrics['eval_loss']:.4f}"
    if "eval_accuracy" in metrics:
        return (
            f"{loss}, {metrics['eval_accuracy']:.1%} of {counted(round(metrics['eval_rows']), 'row')} classified right"
        )
    if "eval_answers" in metrics:
        right, count = metrics["eval_rewards/accuracies"], metrics["eval_answers"]
        return f"{loss}, {right:.1%} of {counted(round(count), 'answer')} judged right, KL {metrics['eval_kl']:.4g}"
    if "eval_pairs" in metrics:
        right, margin = metrics["eval_rewards/accuracies"], metrics["eval_rewards/margins"]
        pairs = counted(round(metrics["eval_pairs"]), "pair")
        return f"{loss}, {right:.1%} of {pairs} preferred right, reward margin {margin:.4g}"
    perplexity = f", eval_ppl {metrics['eval_ppl']:.4g}" if "eval_ppl" in metrics else ""
    return f"{loss}{perplexity} on {metrics['eval_tokens']:,.0f} tokens"
