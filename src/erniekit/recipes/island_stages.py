"""Stages of a job on unlike devices: speeds as the key `islands` gives them, or measured here; then the cut.

Called by run_plan.py once the ranks have met. Every rank computes the same cut from the same numbers.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from erniekit.config import RunConfig
from erniekit.devices.base import Device
from erniekit.devices.islands import island_of_rank, parse_islands
from erniekit.log import emit
from erniekit.models.config import DecoderConfig
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.planner.island_split import fitted
from erniekit.planner.memory import GIB
from erniekit.printable import counted

MEASURED_S = 0.5  # of products, after a first one
TOKENS = 1024


def cut(cfg: RunConfig, device: Device, world: World, model: DecoderConfig) -> Layout:
    """The layout with its stages cut for the islands; as it is where the recipe cuts, or all devices are the same."""
    layout, islands = world.layout, world.islands
    if islands is None or world.size == 1:
        return layout
    emit(f"islands  {islands.describe()}; a pipeline across, through host memory")
    if layout.stage_cuts or layout.virtual_stages > 1:
        return layout
    named = island_of_rank(parse_islands(cfg.parallel.islands), world.rank)
    speed, memory = (named.speed, named.memory) if named is not None else (None, None)
    given = all(one.speed is not None for one in parse_islands(cfg.parallel.islands))
    if not given:
        speed = product_rate(device, cfg.precision.bf16, model)
    memory_here = memory or device.total_memory
    gathered = world.gather((speed, memory_here, device.triton))
    each = layout.size // layout.pp
    stages = [gathered[s * each : (s + 1) * each] for s in range(layout.pp)]
    speeds = [statistics.median(rank[0] for rank in stage) for stage in stages]
    memories = [min(rank[1] for rank in stage) for stage in stages]
    counts, found = fitted(
        _job(cfg, layout), layout, [1 / s for s in speeds], memories, [stage[0][2] for stage in stages]
    )  # fmt: skip
    how = "given" if given else "measured"
    over = islands.stage_interconnects(layout)
    for s, (count, taken) in enumerate(zip(counts, found, strict=True)):
        share = speeds[s] / max(speeds)
        emit(
            f"stage {s}  {counted(count, 'layer')} on {over[s]} (speed {share:.2f} of the "
            f"fastest, {how}; about {taken.total / GIB:.1f} GiB a rank)"
        )
    return replace(layout, stage_cuts=tuple(accumulate(counts))[:-1])


def _job(cfg: RunConfig, layout: Layout) -> Any:
    from erniekit.recipes.planning import job_of, shape_of

    packs = cfg.train.per_device_train_batch_size * max(1, cfg.train.gradient_accumulation_steps) * layout.data_ranks
    return job_of(cfg, shape_of(cfg), packs)


@torch.no_grad()
def product_rate(device: Device, bf16: bool, model: DecoderConfig) -> float:
    """FLOPs a second of products of this model's width, in what the run computes in."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    x = torch.ones(TOKENS, model.hidden_size, dtype=dtype, device=device.handle)
    w = torch.ones(model.hidden_size, model.hidden_size, dtype=dtype, device=device.handle)

    def product() -> None:
        torch.mm(x, w)
        device.synchronise()

    product()
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < MEASURED_S:
        product()
        runs += 1
    return 2.0 * TOKENS * model.hidden_size**2 * runs / (time.perf_counter() - began)
