"""What holds a run's speed back on the device at hand, and the one key that would change each. Printed by doctor.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from erniekit.kernels.selection import Choice
from erniekit.log import emit
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.speed_decisions import why_rows_stay

SHORT = 0.5  # of max_seq_len: rows below it leave more than half of a sequence's work undone when packed


class Brake(NamedTuple):
    what: str
    key: str  # to write in the recipe, or what to install


def brakes(plan: RunPlan, data: TrainData, kernels: list[Choice]) -> Iterator[Brake]:
    """The heaviest first. None on a CPU, where no kernel or program of ours is held back."""
    cfg, device = plan.config, plan.device
    if not device.triton:
        return
    if cfg.precision.compute_type == "fp32" and device.fast_bf16:
        yield Brake("fp32: products at a fraction of the card's rate, nothing compiled", "compute_type: bf16")
    if cfg.train.deterministic:
        yield Brake("the same bits in every run: slower kernels in the backward pass", "deterministic: False")
    if cfg.model.compile is False and cfg.given("compile") and not cfg.model.cuda_graph:
        yield Brake("layers are neither compiled nor replayed, as set in the recipe", "compile: True")
    by = {choice.operation: choice for choice in kernels}
    if cfg.model.attention != "auto":
        yield Brake(f"attention: {cfg.model.attention} instead of the fastest kernel here", "attention: auto")
    elif any(by[name].implementation == "sdpa" for name in ("attention", "packed attention") if name in by):
        yield Brake("no FlashAttention kernel here", 'pip install "erniekit-torch[flash4]" (Hopper), or [cudnn]')
    if cfg.memory.recompute and not cfg.memory.no_recompute_layers:
        yield Brake("every layer is computed again in the backward pass", "recompute_granularity: auto")
    yield from _rows(plan, data)


def _rows(plan: RunPlan, data: TrainData) -> Iterator[Brake]:
    cfg = plan.config
    if cfg.data.packing or cfg.train.stage not in ("SFT", "DPO"):
        return
    if not cfg.data.joins_rows and why_rows_stay(cfg, plan.world.layout, plan.folder.config) is None:
        filled = cfg.model.compile or cfg.model.cuda_graph
        shapes = "every row is filled up to max_seq_len" if filled else "no compiled shapes, no CUDA graphs"
        yield Brake(f"rows of many lengths: {shapes}", "length_buckets: auto")
    if cfg.compat.rows_of_one_length:
        yield Brake("compat: erniekit pads every row to max_seq_len", "packing: True")
        return
    samples = sum(len(source) for source in data.sources)
    mean = sum(source.report.tokens for source in data.sources) / max(1, samples)
    if mean < SHORT * cfg.data.max_seq_len:
        other = "packing: True (other samples then share a step)"
        yield Brake(f"rows of {mean:,.0f} tokens, each alone in a sequence of {cfg.data.max_seq_len:,}", other)


def show(plan: RunPlan, data: TrainData, kernels: list[Choice]) -> None:
    for number, brake in enumerate(brakes(plan, data, kernels)):
        emit(f"{'speed' if number == 0 else '':<9}{brake.what}; faster with {brake.key}")
