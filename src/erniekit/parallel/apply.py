"""The one order in which a model is spread: context -> tensor -> experts -> pipeline -> compile -> recompute -> fsdp.

Called by recipes/build.py with a model on the meta device, adapters already in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.devices.base import Device
from erniekit.model_contract import choose_kernels, packed_layers, spread, wrap
from erniekit.parallel import comm
from erniekit.parallel.boundary import boundary_of
from erniekit.parallel.compiled import compile_layers
from erniekit.parallel.context import KeysOfAll
from erniekit.parallel.cuda_graphs import Graphed, GraphedLayers
from erniekit.parallel.engine import Engine, Loss
from erniekit.parallel.expert import apply_expert_parallel
from erniekit.parallel.fsdp import apply_fsdp
from erniekit.parallel.gradients import GradientSync, local
from erniekit.parallel.host_layers import HostLayers
from erniekit.parallel.memory import give_memory
from erniekit.parallel.mesh import World
from erniekit.parallel.packed_shards import PackedShards, is_packed_bytes, weight_of
from erniekit.parallel.pipeline import Pipeline
from erniekit.parallel.recompute import HostInputs, apply_recompute
from erniekit.parallel.recorded_tower import RecordedTower
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.sharding_table import plain
from erniekit.parallel.stages import cut
from erniekit.parallel.tensor import SlicedInsertion, apply_tensor_parallel


@dataclass(frozen=True)
class SpreadOptions:
    recompute: str | None = None  # granularity
    no_recompute_layers: tuple[int, ...] = ()
    compile: bool = False
    as_written: bool = False  # compiled layers round as others do: a policy and its reference are then one network
    graphed: Graphed | None = None  # None: layers are launched
    schedule: str = "auto"
    runner: str = "erniekit"  # of pipelines: erniekit | torch
    offload: bool = False  # of what fully_shard spreads
    offload_recompute_inputs: bool = False
    attention: str = "auto"
    dispatch: str = "all_to_all"  # how tokens reach experts on other ranks: all_to_all | all_gather
    in_host_memory: tuple[int, ...] = ()  # layers whose packed weights stay there; all of them are recomputed


def parallelise(
    model: nn.Module,
    sharding: Sharding,
    world: World,
    device: Device,
    compute: torch.dtype,
    loss: Loss,
    fill: Callable[[str, torch.Tensor], None],
    one_document: Callable[[torch.Tensor, int], Any],
    options: SpreadOptions,
) -> Engine:
    """`fill(plain name, local tensor)` writes a weight's values once it has memory, one tensor at a time."""
    for layer in spread(model).blocks():
        layer.attn.inner.backend = options.attention
    if world.layout.cp > 1:
        group = world.group("cp")
        assert group is not None
        for layer in spread(model).blocks():
            layer.attn.inner.all_keys = KeysOfAll(group)
        for tower in spread(model).towers().values():
            tower.insert = SlicedInsertion()
    apply_tensor_parallel(model, sharding, world)
    apply_expert_parallel(model, sharding, world, options.dispatch)
    parts = cut(model, sharding, world)
    inputs = HostInputs(device) if options.offload_recompute_inputs else None
    hosted: list[HostLayers] = []
    shards: list[PackedShards] = []
    for _, part in parts:
        # What is computed again inside a layer is compiled with it; a whole layer is compiled, then computed again.
        whole = options.recompute == "full"
        if options.recompute and not whole:
            apply_recompute(part, options.recompute, options.no_recompute_layers, inputs)
        if device.triton:
            choose_kernels(part, device.handle)
        if options.compile:
            # Kernels that take packs as they are multiply 16-bit numbers, and ranks of a sequence have packs only.
            on_host = not device.triton or (world.layout.cp > 1 and compute == torch.float32)
            inside = world.layout.fsdp > 1
            compile_layers(part, packs_on_host=on_host, shards_inside=inside, as_written=options.as_written)
        # Around what is compiled, inside what is computed again: brought once more for that.
        hosted.append(HostLayers(part, options.in_host_memory, device))
        away, on = options.in_host_memory, options.compile
        shards.append(PackedShards(part, sharding, world.rank, compute, device.handle, away, on))
        if whole:
            apply_recompute(part, "full", options.no_recompute_layers, inputs)
        if options.graphed:
            _record(part, device, options.graphed)
    modules = [part for _, part in parts]
    averaged_over = apply_fsdp(modules, world, compute, options.offload)
    # torch requires shards that live on the host to be created there.
    home = torch.device("cpu") if options.offload and world.layout.fsdp > 1 else device.handle
    with torch.no_grad():
        done: set[int] = set()
        for part, host, pieces in zip(modules, hosted, shards, strict=True):
            _give_memory(part, home)
            _pack(part, sharding, world, device, compute, fill, host, pieces)
            for name, param in part.named_parameters():
                if id(param) not in done and not is_packed_bytes(name):
                    done.add(id(param))
                    fill(plain(name), local(param))
    names = list(dict.fromkeys(n for part in modules for n, p in part.named_parameters() if p.requires_grad))
    pipeline = _pipeline(parts, world, device, loss, options)
    sync = GradientSync([plain(n) for n in names], sharding, world) if world.size > 1 else None
    return Engine(parts, world, device, loss, sync, averaged_over, pipeline, compute, one_document)


def _record(part: nn.Module, device: Device, batches: Graphed) -> None:
    graphs = GraphedLayers(spread(part), device, batches)
    wrap(part, lambda _: graphs, "run_layers")
    for tower in spread(part).towers().values() if spread(part).first else ():
        if tower.recordable is not None:
            tower.run = RecordedTower(tower.recordable, device)


def _pipeline(
    parts: list[tuple[int, nn.Module]], world: World, device: Device, loss: Loss, options: SpreadOptions
) -> Pipeline | None:
    group = world.group("pp")
    if group is None:
        return None
    boundary = boundary_of(world, device, group)
    if options.runner == "torch":
        from erniekit.parallel.torch_pipeline import TorchPipeline  # torch's schedules import its compiler: seconds

        return TorchPipeline(group, parts, world, boundary, device.handle, loss, options.schedule)
    splits = not (options.recompute or options.compile or options.graphed)
    return Pipeline(parts, world, boundary, device.handle, loss, options.schedule, splits)


def _pack(
    part: nn.Module,
    sharding: Sharding,
    world: World,
    device: Device,
    compute: torch.dtype,
    fill: Callable[[str, torch.Tensor], None],
    host: HostLayers,
    pieces: PackedShards,
) -> None:
    """Frozen weights that are not kept plain, one after the other: memory holds one of them both ways at most."""
    on_host = device.handle.type == "cpu"
    for name, holder in packed_layers(part).items():
        if holder.is_packed:
            continue
        weight = weight_of(name)
        sharding.packed.add(weight)
        piece = torch.empty(holder.held_shape, dtype=compute, device=device.handle)
        fill(weight, piece)
        holder.pack(piece, _agree(world.group("tp")) if sharding.cuts_columns(weight, world.rank) else None)
        host.take(holder)
        pieces.take(holder, weight)
        if on_host:  # malloc keeps the holes that plain weights leave between packed ones: more with every layer
            del piece
            device.empty_cache()


def _agree(group: ProcessGroup | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def largest(values: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(values, group, "max")
        return values

    return largest


def _give_memory(part: nn.Module, device: torch.device) -> None:
    """Only what is still without: stages may share a tied embedding."""
    if any(p.is_meta for p in part.parameters()):
        give_memory(part, device)
