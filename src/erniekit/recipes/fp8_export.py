"""`erniekit export` of a run with compute_type fp8: FP8 weights with the scales that were trained with.

Called by run.py. Adapters are merged first; their share was never rounded in training, so the error that
merging and rounding add is printed.
"""

from __future__ import annotations

from pathlib import Path

from erniekit.checkpoint import fp8_file
from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, need
from erniekit.export.plan import ExportPlan, named_tokenizer, plan_of
from erniekit.export.run import run_export
from erniekit.log import emit, paint, typed, warn
from erniekit.quantize.fp8_static import StaticProof, write_static
from erniekit.result import RunResult


def trained_in_fp8(cfg: RunConfig) -> bool:
    need(cfg, "output_dir")
    return fp8_file.load(_trained(plan_of(cfg))) is not None


def _trained(plan: ExportPlan) -> Path:
    return plan.adapters[0] if len(plan.adapters) == 1 else plan.base


def export_fp8(cfg: RunConfig) -> RunResult:
    plan = plan_of(cfg)
    scales = fp8_file.load(_trained(plan))
    assert scales is not None
    emit("note     trained with compute_type fp8: the weights are written in FP8, with the scales of training")
    out, source, probe = plan.out, plan.base, probes.load(plan.base)
    if plan.adapters:
        source, out, probe = Path(run_export(cfg).output_dir), out.with_name(f"{out.name}-fp8"), None
    folder = ModelFolder(source)
    if probe is not None:
        probes.require_fit(probe, folder.config, source)
    if cfg.checkpoint.save_format != "hf" and cfg.given("save_format"):
        warn(f"save_format: {cfg.checkpoint.save_format} has no FP8 weights; written in hf")
    tokenizer = (named_tokenizer(cfg) or source) if cfg.export.copy_tokenizer else None
    shards = cfg.export.max_shard_size
    proof = write_static(folder, scales, out, tokenizer=tokenizer, max_shard_size=shards, probe=probe)
    _print_result(proof, out, bool(plan.adapters))
    command = typed("chat", out)
    emit(paint(f"next     {command}", "bold"))
    return RunResult(out, next_commands=[command])


def _print_result(proof: StaticProof | None, out: Path, merged: bool) -> None:
    if proof is not None:
        emit(f"checked  FP8 logits within {proof.difference:.1e} of training's (allowed {proof.allowed:.1e})")
        if proof.difference > proof.allowed:
            warn(
                "that is more than rounding in bf16 alone: an expert was chosen otherwise, or the device sums otherwise"
            )
    if merged:
        emit("note     adapters were not rounded in training, merged ones are: evaluate this folder before you use it")
    size = sum(file.stat().st_size for file in out.glob("model*.safetensors"))
    emit(f"saved    {out} (compressed-tensors, static FP8, {size / 1e6:.1f} MB)")
