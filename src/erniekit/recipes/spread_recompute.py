"""recompute_granularity: auto on several ranks: as few layers are computed again as the planner's bytes of each rank
allow. On one rank, speed_decisions.py decides. Called by run_plan.py."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.config.note import Note
from erniekit.devices.base import Device
from erniekit.log import warn
from erniekit.lora.settings import LoRASettings
from erniekit.parallel.mesh import World
from erniekit.planner.evaluate import computed_again, largest
from erniekit.recipes import planning
from erniekit.recipes.memory_decisions import gib, limit_of, tell_too_low


def notes(
    cfg: RunConfig, device: Device, world: World, folder: ModelFolder, lora: LoRASettings | None
) -> Iterator[Note]:
    """world: with the layout that the model is cut by."""
    m = cfg.memory
    if world.size == 1 or not m.recompute or m.recompute_granularity != "auto":
        return
    yield Note("recompute_granularity", "auto", "full", "whole layers, as few as needed")
    # Ranks must agree on what is computed again, also those of unlike devices (islands): the smallest, without kernels
    # that some have not.
    limit, fused = min(world.gather(limit_of(cfg, device))), all(world.gather(device.triton))
    if not limit:
        return
    layout, layers = world.layout, folder.config.num_layers
    job = planning.job_in(cfg, planning.shape_in(cfg, folder, lora), layout)
    again, most = computed_again(job, layout, limit, fused)
    kept = tuple(n for n in range(layers) if n not in again)
    reason = f"{len(again)} of {layers} layers are computed again to stay in {gib(limit)} GiB a rank"
    if cfg.memory.memory_limit:
        tell_too_low(cfg, most.weights, most.total, limit)
    elif most.total > limit:
        plan = f"{gib(most.total)} GiB are planned for a rank, {gib(limit)} may be taken"
        warn(f"with every layer computed again, {plan}: {largest(most)}; `erniekit plan` shows what fits")
    yield Note("no_recompute_layers", m.no_recompute_layers, kept, reason)
