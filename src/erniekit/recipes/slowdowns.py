"""What holds a run's speed back on the device at hand, and the one key that would change each. Printed by
doctor_command.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from erniekit.config import RunConfig
from erniekit.kernels import cudnn_packed, flash4
from erniekit.kernels.selection import FORCED, OPERATIONS, Choice
from erniekit.log import emit
from erniekit.recipes import stage_of
from erniekit.recipes.datasets import TrainData, usual_tokens
from erniekit.recipes.other_models import cuts_pairs
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.speed_decisions import REPLAYED_STAGES, collectives_inside, why_rows_stay, worth_replaying

SHORT = 0.5  # of max_seq_len: rows below it leave more than half of a sequence's work undone when packed
PACKED = "packing: True (other samples then share a step)"
MISSING = {flash4.PACKAGE: "flash4", cudnn_packed.PACKAGE: "cudnn"}  # -> the extra that installs it


class Slowdown(NamedTuple):
    what: str
    key: str  # to write in the recipe, or what to install


def slowdowns(plan: RunPlan, data: TrainData, kernels: list[Choice]) -> Iterator[Slowdown]:
    """The heaviest first. None on a CPU, where no kernel or program of ours is held back."""
    cfg, device = plan.config, plan.device
    if not device.triton:
        return
    if cfg.precision.compute_type == "fp32" and device.fast_bf16:
        yield Slowdown("fp32: products at a fraction of the card's rate, nothing compiled", "compute_type: bf16")
    if cfg.train.deterministic:
        yield Slowdown("the same bits in every run: slower kernels in the backward pass", "deterministic: False")
    if _as_written(cfg):
        yield Slowdown("layers are neither compiled nor replayed, as set in the recipe", "compile: True")
    yield from _kernels(cfg, kernels)
    yield from _memory(cfg)
    yield from _launches(plan, data)
    yield from _reference(cfg, data)
    yield from _rows(plan, data)


def _as_written(cfg: RunConfig) -> bool:
    return cfg.model.compile is False and cfg.given("compile") and not cfg.model.cuda_graph


def _kernels(cfg: RunConfig, kernels: list[Choice]) -> Iterator[Slowdown]:
    for choice in kernels:
        if choice.reason == FORCED and choice.implementation != OPERATIONS[choice.operation][0].name:
            entry = f"{choice.operation}={choice.implementation}"
            yield Slowdown(f"kernels: {entry} is forced", f"kernels without {entry}")
    attention = [choice for choice in kernels if choice.operation in ("attention", "packed attention")]
    if cfg.model.attention != "auto":
        yield Slowdown(f"attention: {cfg.model.attention} instead of the fastest kernel here", "attention: auto")
        return
    for package, extra in MISSING.items():
        for choice in attention:
            if (problem := f"{package} is not installed") in choice.reason:
                what = f"{choice.operation} by {choice.implementation}: {problem}"
                yield Slowdown(what, f'pip install "erniekit-torch[{extra}]"')
                return
    if any(choice.implementation == "sdpa" and choice.reason != FORCED for choice in attention):
        yield Slowdown("no FlashAttention kernel here", 'pip install "erniekit-torch[flash4]" (Hopper), or [cudnn]')


def _memory(cfg: RunConfig) -> Iterator[Slowdown]:
    """What takes time to save memory, as the recipe has it. `auto` has computed again no more than it must."""
    automatic = any(note.key == "recompute_granularity" and note.old == "auto" for note in cfg.notes)
    if cfg.memory.recompute and not cfg.memory.no_recompute_layers and not automatic:
        yield Slowdown("every layer is computed again in the backward pass", "recompute_granularity: auto")
    if cfg.moe.use_recompute_moe and not cfg.memory.recompute:
        yield Slowdown("experts are computed again in the backward pass", "use_recompute_moe: False")
    for key in ("offload_optim", "tensorwise_offload_optimizer"):
        if cfg[key]:
            yield Slowdown("optimiser states wait in host memory", f"{key}: False, where the device has room for them")
            return


def _launches(plan: RunPlan, data: TrainData) -> Iterator[Slowdown]:
    """Where kernels are launched one by one although the device waits for that, and a key is why."""
    cfg, model = plan.config, plan.folder.config
    possible = plan.device.records_graphs and not collectives_inside(plan.world.layout) and not cfg.memory.recompute
    if cfg.model.cuda_graph or not possible or cfg.train.stage not in REPLAYED_STAGES or _as_written(cfg):
        return
    if cfg.given("cuda_graph") or model.mtp_layers:
        key = "cuda_graph: True"
    elif cfg.optim.update_in_backward:
        key = "update_in_backward: False"
    else:
        return
    if worth_replaying(cfg, plan.device, model, usual_tokens(plan, data)):
        yield Slowdown("the host launches kernels more slowly than the device runs them", key)


def _reference(cfg: RunConfig, data: TrainData) -> Iterator[Slowdown]:
    """A reference that is measured again in each pass over the data."""
    live = cfg.dpo.reference_logps == "live" and cfg.dpo.ref_model_update_steps <= 0 and not cuts_pairs(cfg)
    if live and stage_of(cfg).compares(cfg) and data.max_steps * data.packs_per_step >= 2 * data.packs_per_epoch:
        yield Slowdown("the reference answers the same rows in every epoch", "reference_logps: cached")


def _rows(plan: RunPlan, data: TrainData) -> Iterator[Slowdown]:
    cfg = plan.config
    if cfg.data.packing or cfg.train.stage == "PT":
        return
    if cfg.compat.rows_of_one_length:
        yield Slowdown("compat: erniekit pads every row to max_seq_len", "packing: True")
        return
    joinable = cfg.train.stage in ("SFT", "DPO")
    filled = bool(cfg.model.compile or cfg.model.cuda_graph)
    if not cfg.data.joins_rows and (filled or joinable):
        key = _key_of_rows(plan)
        if key is not None:
            shapes = "every row is filled up to max_seq_len" if filled else "no compiled shapes, no CUDA graphs"
            yield Slowdown(f"rows of many lengths: {shapes}", key)
        if key == PACKED:
            return
    if data.is_streamed or not joinable:
        return
    samples = sum(len(source) for source in data.sources)
    mean = sum(source.report.tokens for source in data.sources) / max(1, samples)
    if mean < SHORT * cfg.data.max_seq_len:
        yield Slowdown(f"rows of {mean:,.0f} tokens, each alone in a sequence of {cfg.data.max_seq_len:,}", PACKED)


def _key_of_rows(plan: RunPlan) -> str | None:
    """What would join the rows; None: the key that leaves layers as they are written, named above."""
    cfg = plan.config
    if why_rows_stay(cfg, plan.world.layout, plan.folder.config) is None:
        return "length_buckets: auto" if cfg.given("length_buckets") else None
    return "streaming: False" if cfg.data.streaming and cfg.train.stage in ("SFT", "DPO") else PACKED


def show(plan: RunPlan, data: TrainData, kernels: list[Choice]) -> None:
    for number, slowdown in enumerate(slowdowns(plan, data, kernels)):
        emit(f"{'speed' if number == 0 else '':<9}{slowdown.what}; faster with {slowdown.key}")
