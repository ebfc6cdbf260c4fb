"""`erniekit quantize`, and `erniekit export quant=NAME`: keys to rows, device and a QuantiseJob (quantize/run.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.checkpoint.hub import resolve_model
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, need
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import Batch
from erniekit.errors import CheckpointError, ConfigError
from erniekit.export.plan import named_tokenizer, plan_of
from erniekit.export.run import no_adapter, run_export
from erniekit.export.source import find_source
from erniekit.export.target import QUANTIZE, check_target
from erniekit.log import emit, paint, typed, warn
from erniekit.models.score_head import refuse as refuse_score_head
from erniekit.printable import counted
from erniekit.quant_schemes import QUANT_RECIPES, QuantRecipe
from erniekit.quantize.fit import fitted, require_plain
from erniekit.quantize.layer_weights import Method
from erniekit.quantize.model_files import LAYOUT
from erniekit.quantize.readers import warnings
from erniekit.quantize.report import HTML
from erniekit.quantize.run import QuantiseJob, quantise
from erniekit.recipes.calibration_rows import calibration_rows, evaluation_rows, rows_are_given
from erniekit.recipes.run_plan import in_16_bits, open_device
from erniekit.result import RunResult
from erniekit.weight_kinds import BF16


def run_quantize(cfg: RunConfig, command: Sequence[str] = ()) -> RunResult:
    """model_name_or_path, a model or a run's folder with one, to output_dir."""
    need(cfg, "model_name_or_path", "quant", "output_dir")
    if not cfg.given("output_dir"):
        raise ConfigError("output_dir must be given", where="command line", fix="output_dir=DIR: where the result goes")
    _refuse_keys_of_export(cfg)
    return _quantised(cfg, _source(cfg), Path(str(cfg.train.output_dir)).expanduser())


def _refuse_keys_of_export(cfg: RunConfig) -> None:
    """Keys that say what is written, and would be dropped."""
    asked = {"format": cfg.export.format == "gguf", "gguf_type": cfg.given("gguf_type")}
    asked["merge_grid"] = cfg.export.merge_grid != BF16
    for name in (name for name, given in asked.items() if given):
        raise ConfigError(
            f"quantize writes safetensors of a whole model; {name} is a key of `erniekit export`",
            where=cfg.origin(name),
            fix="leave it out; a GGUF file: `erniekit export DIR format=gguf gguf_type=q4_0`",
        )
    _tell_layout(cfg)


def _tell_layout(cfg: RunConfig) -> None:
    if cfg.checkpoint.save_format != LAYOUT and cfg.given("save_format"):
        warn(f"save_format: {cfg.checkpoint.save_format} has no quantised weights; written in {LAYOUT}")


def export_quantised(cfg: RunConfig) -> RunResult:
    """What `export` would write, merged where there are adapters, and then quantised into a folder next to it."""
    need(cfg, "output_dir", "quant")
    plan = plan_of(cfg)
    out = plan.out.with_name(f"{plan.out.name}-{cfg.quantize.quant}")
    if plan.adapters:  # refused before the merge, which may take an hour
        _compensates(cfg, _recipe(cfg, ModelFolder(plan.base)))
        check_target(out, [plan.base, *plan.adapters], QUANTIZE)
    elif cfg.export.merge_grid != BF16:
        raise no_adapter(cfg.export.merge_grid)
    _tell_layout(cfg)
    source = run_export(cfg).output_dir if plan.adapters else plan.base
    return _quantised(cfg, Path(source), out)


def _source(cfg: RunConfig) -> Path:
    name = str(cfg.model.model_name_or_path)
    folder = Path(name).expanduser()
    found = find_source(folder) if folder.is_dir() else None
    if found is None:
        return resolve_model(name, cfg.model.download_hub)
    if found.is_adapter:
        raise CheckpointError(
            "this folder holds an adapter, not a whole model",
            where=f"model_name_or_path: {found.path}",
            fix=f"merge and quantise in one: {typed('export', folder, f'quant={cfg.quantize.quant}')}",
        )
    return found.path


def _quantised(cfg: RunConfig, source: Path, out: Path) -> RunResult:
    opened = open_device(in_16_bits(cfg))
    cfg = opened.config
    folder = ModelFolder(source)
    refuse_score_head(folder.config.labels, "quantize", str(folder.path))
    quant, recipe = str(cfg.quantize.quant), _recipe(cfg, folder)
    check_target(out, [source], QUANTIZE)
    compensate = _compensates(cfg, recipe)
    if not compensate and cfg.quantize.quant_method is None and not rows_are_given(cfg):
        emit("note     rounded to nearest: with rows (train_dataset_path) errors are carried on, which is better")
    emit(f"model    {source}")
    groups = sorted({scheme.group for scheme in recipe.schemes if scheme.number == "int" and scheme.group})
    sizes = f" (groups of {groups[0]})" if groups else ""
    emit(f"quant    {quant}: {recipe.about}{sizes}; {'GPTQ' if compensate else 'rounded to nearest'}")
    calibrating: list[Batch] = []
    measuring: list[Batch] = []
    if rows_are_given(cfg):
        tokenizer = load_tokenizer(cfg.model.tokenizer_name or source, folder.config.vocab_size)
        calibrating, measuring = calibration_rows(cfg, tokenizer), evaluation_rows(cfg, tokenizer)
    for line in warnings(recipe, folder.config.moe is not None):
        warn(f"{quant}, {line}")
    job = QuantiseJob(
        source,
        out,
        quant,
        recipe,
        Method(compensate, cfg.quantize.expert_tokens),
        opened.device.handle,
        opened.dtype,
        calibrating,
        measuring,
        (named_tokenizer(cfg) or source) if cfg.export.copy_tokenizer else None,
        cfg.export.max_shard_size,
    )
    facts = quantise(job)
    metrics = _print_result(facts, out)
    return RunResult(out, metrics, next_commands=[typed("chat", out)])


def _recipe(cfg: RunConfig, folder: ModelFolder) -> QuantRecipe:
    require_plain(folder)
    return fitted(QUANT_RECIPES[str(cfg.quantize.quant)], folder.config, cfg.quantize.quant_group_size)


def _compensates(cfg: RunConfig, recipe: QuantRecipe) -> bool:
    """gptq or rtn; refused where rows are needed and not given."""
    rows, method = rows_are_given(cfg), cfg.quantize.quant_method
    if not rows and (method == "gptq" or recipe.needs_rows):
        what = "gptq weighs errors by" if method == "gptq" else f"{cfg.quantize.quant} stores the scales of"
        raise ConfigError(
            f"{what} the layers' inputs on real rows, and none are given",
            where="train_dataset_path",
            fix="name a file like those you train on: --data my.jsonl"
            + ("; or quant_method=rtn" if not recipe.needs_rows else "; or quant=fp8_dynamic, which needs none"),
        )
    if recipe.rest.number == "nf4":
        if method == "gptq":
            raise ConfigError("nf4 is rounded to nearest only", where="quant_method: gptq", fix="quant=w4a16 or mxfp4")
        return False
    return rows if method is None else method == "gptq"


def _print_result(facts: dict[str, Any], out: Path) -> dict[str, float]:
    before, after, quality = facts["bytes_before"], facts["bytes_after"], facts["quality"]
    metrics: dict[str, float] = {"bytes_before": before, "bytes_after": after}
    if quality is not None:
        metrics |= {name: quality[name] for name in ("perplexity", "quantised_perplexity", "kl")}
        emit(
            f"quality  perplexity {quality['perplexity']:.4g} -> {quality['quantised_perplexity']:.4g}, KL "
            f"{quality['kl']:.4g} nats a token (on {quality['measured_on']})"
        )
    for row in facts["starved"][:4]:
        warn(f"expert {row['expert']} of layer {row['layer']} was calibrated on {counted(row['used'], 'token')} only")
    if len(facts["starved"]) > 4:
        warn(f"and {counted(len(facts['starved']) - 4, 'expert')} more: {HTML} names them; give more calibration_rows")
    emit(f"saved    {out} ({_size(after)}, {after / before:.0%} of {_size(before)})")
    emit(f"report   {out / HTML}")
    emit(paint(f"next     {typed('chat', out)}", "bold"))
    return metrics


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
