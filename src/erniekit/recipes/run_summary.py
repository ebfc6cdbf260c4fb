"""The first lines of a run: what will happen, with which data, on what; the same facts go to run.json.

Called by training.py and doctor_command.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from erniekit.config import RunConfig
from erniekit.data.report import short, total_lines
from erniekit.data.staged import StagedPacks
from erniekit.devices.base import Device
from erniekit.kernels import broken, cudnn_packed, flash4
from erniekit.kernels.available import installed
from erniekit.kernels.packed_attention import faster_attention
from erniekit.kernels.selection import Choice
from erniekit.log import emit, warn
from erniekit.lora.coverage import coverage, coverage_table
from erniekit.models import costs
from erniekit.models.config import DecoderConfig
from erniekit.printable import counted, every
from erniekit.recipes import kernel_table, repeat, trained_weights
from erniekit.recipes.built import Built
from erniekit.recipes.check import Check
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.save_times import minutes_between_saves
from erniekit.track.runfile import RunRecord
from erniekit.version import __version__

SHOWN_NOTES = 4


def version() -> str:
    return __version__


def show_plan(plan: RunPlan) -> None:
    cfg, folder, device, world = plan.config, plan.folder, plan.device, plan.world
    c = folder.config
    how = "chosen weights" if cfg.tuning.partial else "all weights"
    if plan.lora:
        kind = "DoRA" if plan.lora.dora else "LoRA by PiSSA" if plan.lora.pissa else "LoRA"
        how = f"{kind} rank {cfg.lora.lora_rank}, alpha {cfg.lora.lora_alpha}"
    emit(f"run      {how}, {cfg.precision.compute_type}, {device.name}")
    if plan.lora and cfg.lora.lora_path:
        own = f"rank {cfg.lora.lora_rank} and alpha {cfg.lora.lora_alpha} are its own"
        emit(f"adapter  training continues from {cfg.lora.lora_path[0]}; {own}")
    layout = "Paddle" if folder.layout == "paddle" else "HF"
    weights = f"{short(costs.parameters(c))} weights"
    if c.moe is not None:
        weights += f", {short(costs.active_parameters(c))} of them used per token"
    emit(f"model    {folder.path} ({c.family}, {weights}, {counted(c.num_layers, 'layer')}, {layout} layout)")
    if world.size > 1:
        emit(f"layout   {world.size} ranks: {world.layout.describe()}")
    notes = [note for note in cfg.notes if not note.quiet]
    for note in notes[:SHOWN_NOTES]:
        emit(f"note     {note}")
    if len(notes) > SHOWN_NOTES:
        emit(f"note     and {len(notes) - SHOWN_NOTES} more: `erniekit config` shows all")
    if (card := device.capability()) and (hint := _faster(card)):
        emit(f"note     {hint}")


def _faster(card: tuple[int, int]) -> str | None:
    return faster_attention(card, installed(flash4.PACKAGE), installed(cudnn_packed.PACKAGE))


def show_data(data: TrainData, plan: RunPlan) -> None:
    cfg = plan.config
    for label, sources in (("data", data.sources), ("eval", data.evaluation)):
        lines = [line for source in sources for line in source.report.lines()]
        for k, line in enumerate(lines + total_lines([s.report for s in sources])):
            emit(f"{label if k == 0 else '':<9}{line}")
    warn_of_long_rows(data, plan.folder.config)
    amount = f"{counted(data.max_steps, 'step')}, {counted(data.packs_per_step, 'sequence')} each"
    if data.is_streamed:
        emit(f"train    {amount}; rows are read on while it trains (streaming)")
        return
    # Rows of one sample each are as long as it is, not filled up.
    packing = cfg.data.packing or cfg.train.stage == "PT"
    size = f"of {'' if packing else 'at most '}{data.stream.max_seq_len:,} tokens per epoch"
    filled = f", {100 * data.filled:.0f} % filled" if packing else ""
    emit(f"train    {amount}; {counted(data.packs_per_epoch, 'sequence')} {size}{filled}")
    if isinstance(data.stream, StagedPacks):
        steps = [(pack // data.packs_per_step + 1, shares) for pack, shares in data.stream.stages]
        emit("mix      " + "; ".join(f"from step {n:,}: {'/'.join(f'{s:g}' for s in shares)}" for n, shares in steps))
    if data.lengths:
        each = ", ".join(f"{length:,}" for length in data.lengths)
        share = f"{100 * data.padded_share:.1f} % of all tokens are padding"
        emit(f"rows     joined, padded to {each} tokens: {share} (length_buckets)")


def warn_of_long_rows(data: TrainData, config: DecoderConfig) -> None:
    """Of samples longer than the model has positions for; those of rows that are still to be read are not known."""
    longest = max((s.report.lengths.get("max", 0) for s in (*data.sources, *data.evaluation)), default=0)
    if longest > config.max_positions:
        warn(
            f"the longest sample has {longest:,} tokens and the model has {config.max_positions:,} positions "
            "(max_position_embeddings): those behind them are new to it, and a server of it takes no more than that; "
            f"max_seq_len={config.max_positions} keeps within them"
        )


def show_saves(cfg: RunConfig, data: TrainData) -> None:
    minutes = minutes_between_saves(cfg)
    when = [every(data.save_every, "step")] if 0 < data.save_every < data.max_steps else []
    when += [f"{every(minutes, 'minute')} (save_minutes)"] if minutes else []
    emit(f"saves    {', '.join([*when, 'at the end'])}")


def show_compiling(cfg: RunConfig, steps: int) -> None:
    """steps: that are left. Where there are none nothing is compiled."""
    if cfg.model.compile and steps > 0:
        emit("compile  layers are compiled in the first step: it can take a minute or more")


def show_coverage(built: Built) -> list[Any]:
    if built.plan.config.tuning.partial and not built.lora:
        emit(f"train    {trained_weights.described(built.plan.config, built.whole)}")
        return [{"group": "chosen weights", "trainable": built.trainable(), "total": built.total()}]
    if not built.lora:
        resting = built.folder.config.mtp_layers and not built.mtp_tokens
        but = " but the layers that predict further tokens: num_nextn_predict_layers trains those" if resting else ""
        emit(f"train    all {built.trainable():,} weights{but}")
        return [{"group": "all weights", "trainable": built.trainable(), "total": built.total()}]
    for k, line in enumerate(coverage_table(built.whole).splitlines()):
        emit(f"{'train' if k == 0 else '':<9}{line.removeprefix('  ')}")
    return [vars(row) for row in coverage(built.whole)]


def show_kernels(table: list[Choice]) -> None:
    for k, line in enumerate(kernel_table.lines(table)):
        emit(f"{'kernels' if k == 0 else '':<9}{line}")


def data_facts(data: TrainData) -> dict[str, Any]:
    return {
        "train": [s.report.to_dict() for s in data.sources],
        "eval": [s.report.to_dict() for s in data.evaluation],
        "packs_per_epoch": None if data.is_streamed else data.packs_per_epoch,
        "max_steps": data.max_steps,
        "digests": data.fingerprints(),
    }


def describe(
    record: RunRecord,
    cfg: RunConfig,
    data: TrainData,
    coverage: list[Any],
    device: Device,
    kernels: list[Choice],
    checks: Sequence[Check] = (),
    notes: Sequence[str] = (),
    seconds: Mapping[str, float] | None = None,
) -> None:
    """checks: what the doctor found. notes: beside the config's own. seconds: of the parts of the preparation."""
    record.describe(
        start_seconds=seconds,
        checks=[{"check": check.name, "found": check.text} for check in checks],
        config=[{"key": k, "value": v, "origin": cfg.origin(k)} for k, v in cfg.flat().items()],
        notes=[*(str(note) for note in cfg.notes), *notes, *broken.tracebacks()],
        environment=repeat.environment(device.name),
        data=data_facts(data),
        coverage=coverage,
        kernels=[choice._asdict() for choice in kernels],
    )
