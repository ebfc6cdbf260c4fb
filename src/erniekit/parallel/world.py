"""Joining the other ranks: the layout of the configured degrees, and the process group under it.

Called once by a recipe; inside a worker torch's launcher has set RANK, WORLD_SIZE and where to meet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from erniekit.devices.islands import island_of_rank, parse_islands
from erniekit.errors import ConfigError, DeviceError, ErnieKitError, PlanError
from erniekit.parallel.islands import ACROSS, Islands, check_islands
from erniekit.parallel.layout import Layout, fit
from erniekit.parallel.mesh import World
from erniekit.printable import counted
from erniekit.registry import owner_of

if TYPE_CHECKING:
    from erniekit.devices.base import Device

MEET = timedelta(minutes=10)  # for all ranks to start
TALK = timedelta(minutes=30)  # for one collective: loading a large model keeps ranks apart
PART = timedelta(seconds=30)  # for all ranks to learn why they cannot form a group


EXPERTS_OVER = {
    **dict.fromkeys(("mp", "tp", "model"), "tp"),
    **dict.fromkeys(("data", "dp", "ep"), "data"),
    **dict.fromkeys(("world", "all"), "world"),
    **dict.fromkeys(("dummy", "none"), "none"),
}  # by value of moe_group


def layout_of(parallel: Any, ranks: int | None = None, moe_group: str = "none") -> Layout:
    """From the parallel section's values. `ranks`: how many there will be; where not given, how many there are. Only
    sharding over "all that is left" (a degree below 1) uses them: `fit` checks whether the product comes out even."""
    over, options = EXPERTS_OVER[moe_group], set(parallel.sharding)
    stage = next((k for k in (3, 2, 1) if f"stage{k}" in options), 1)
    cp = max(parallel.context_parallel_degree, parallel.sep_parallel_degree)
    fsdp = parallel.sharding_parallel_degree
    if fsdp < 1:
        others = parallel.pipeline_parallel_degree * parallel.data_parallel_degree * parallel.tensor_parallel_degree
        fsdp = max(1, (ranks or ranks_started()) // (others * cp))
    return Layout(
        pp=parallel.pipeline_parallel_degree,
        dp=parallel.data_parallel_degree,
        fsdp=fsdp,
        cp=cp,
        tp=parallel.tensor_parallel_degree,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_parallel_degree > 1,
        sharding_stage=stage,
        virtual_stages=parallel.virtual_pp_degree if parallel.pipeline_parallel_degree > 1 else 1,
        stage_cuts=_stage_cuts(parallel.pp_seg_method, parallel.pipeline_parallel_degree, parallel.virtual_pp_degree),
        experts=over,
        ep=parallel.expert_parallel_degree if over in ("data", "world") and parallel.expert_parallel_degree > 1 else 0,
    )


def _stage_cuts(method: tuple[str, ...], pp: int, virtual: int) -> tuple[int, ...]:
    """`[0,29,57]` counts pipeline entries: the embedding is entry 0, layer i entry i + 1, then norm and head."""
    numbers = [bound.strip(" []") for bound in method]
    if pp == 1 or not numbers or not all(n.isascii() and n.isdigit() for n in numbers):
        return ()
    bounds = [int(n) for n in numbers]
    if len(bounds) != pp * virtual + 1:
        raise PlanError(
            f"pp_seg_method has {counted(len(bounds) - 1, 'stage')}, the pipeline {pp * virtual}",
            where="pp_seg_method, pipeline_parallel_degree",
            fix=f"give {pp * virtual + 1} bounds, or leave pp_seg_method out for even stages",
        )
    return tuple(bound - 1 for bound in bounds[1:-1])


def check_model(layout: Layout, num_layers: int, experts: int = 0) -> Layout:
    """The layout as a model of this shape uses it."""
    stages = layout.pp * layout.virtual_stages
    if stages > num_layers:
        raise PlanError(
            f"pipeline_parallel_degree={layout.pp} x {counted(layout.virtual_stages, 'stage')} a rank needs {stages} "
            f"layers or more; this model has {num_layers}",
            where="pipeline_parallel_degree, virtual_pp_degree",
            fix=f"use {counted(num_layers, 'stage')} or fewer",
        )
    bounds = [0, *layout.stage_cuts, num_layers]
    if layout.stage_cuts and any(b <= a for a, b in pairwise(bounds)):
        raise PlanError(
            f"pp_seg_method leaves a stage without layers, or goes past the model's {num_layers}",
            where="pp_seg_method",
            fix=f"bounds rise from 0 to {num_layers + 3} (embedding, {num_layers} layers, norm, head)",
        )
    if not experts:
        return replace(layout, experts="none", ep=0)
    if layout.expert_ranks > experts:
        fits = [n for n in range(1, experts + 1) if layout.expert_pool % n == 0]
        raise PlanError(
            f"{layout.expert_ranks} ranks for {experts} experts: some would have none",
            where="moe_group, expert_parallel_degree",
            fix="moe_group: dummy, or fewer tensor-parallel ranks"
            if layout.experts == "tp"
            else f"expert_parallel_degree: {fits[-1]}, or moe_group: dummy",
        )
    return layout


def check_schedule(schedule: str, layout: Layout, further: bool = False, runner: str = "erniekit") -> None:
    """Whether the layout's pipeline can work in this order. further: the model trains layers that predict further
    tokens; runner: whose schedules run."""
    if layout.pp == 1 or schedule != "zero_bubble":
        return
    if layout.fsdp > 1:  # a backward pass in two would gather and reduce a layer twice
        raise PlanError(
            "the zero_bubble schedule does not work with sharded weights",
            where="pp_schedule, sharding_parallel_degree",
            fix="use pp_schedule: interleaved, or data_parallel_degree instead of sharding_parallel_degree",
        )
    if runner == "torch" and further:  # torch's goes through a graph twice where two losses share the head
        raise PlanError(
            "torch's zero_bubble schedule does not work with layers that predict further tokens",
            where="pp_runner, pp_schedule, num_nextn_predict_layers",
            fix="leave pp_runner out, or use pp_schedule: interleaved",
        )


def ranks_started() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_here(islands: Sequence[str], otherwise: str) -> str:
    """The `device` value of this process: its island's, where ranks on unlike devices are started."""
    if not islands or ranks_started() == 1:
        return otherwise
    found = island_of_rank(parse_islands(islands), int(os.environ.get("RANK") or "0"))
    return otherwise if found is None else found.device


def open_world(parallel: Any, device: Device, moe_group: str = "none", on_one: int = 1) -> World:
    """This process's place; joins the group when there are others. on_one: ranks that share a device."""
    size = ranks_started()
    check_ranks_of_islands(parallel.islands, size)
    layout = fit(size, layout_of(parallel, moe_group=moe_group))
    rank = int(os.environ.get("RANK") or "0") if size > 1 else 0
    world = World(layout, rank, device.type)
    if size > 1:
        world.islands = _join(rank, size, device, layout, bool(parallel.islands), on_one)
        first_here = int(os.environ.get("LOCAL_RANK", "0")) == 0
        world.leaders = [r for r, first in enumerate(world.gather(first_here)) if first]
    return world


def check_ranks_of_islands(islands: Sequence[str], size: int) -> None:
    """Before ranks meet: the islands that are named have as many as there are."""
    named = sum(island.ranks for island in parse_islands(islands))
    if islands and size > 1 and named != size:
        raise PlanError(
            f"islands names {counted(named, 'rank')}, and {size} are started",
            where="islands",
            fix="make the two the same",
        )


def check_named_islands(islands: Sequence[str], layout: Layout) -> None:
    """Before there are devices: as many ranks as the layout has, and every stage within one of them."""
    named = parse_islands(islands)
    check_ranks_of_islands(islands, layout.size)
    if named:
        of_ranks = tuple(island.device for island in named for _ in range(island.ranks))
        check_islands(Islands(of_ranks, of_ranks), layout)


def _join(rank: int, size: int, device: Device, layout: Layout, mixes: bool, on_one: int) -> Islands | None:
    """Islands where devices are unlike and that is meant; an error on every rank where it is not."""
    import torch.distributed as dist

    if dist.is_initialized():
        return None
    check_rank_variables(size)
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", rank, size, timeout=MEET)))
        store.set(f"device/{rank}", json.dumps([device.interconnect, device.backend]))
        described = [json.loads(store.get(f"device/{r}").decode()) for r in range(size)]
    except dist.DistError as error:  # stays one: the launcher looks for the rank that ended first, and may start again
        raise dist.DistNetworkError(
            f"rank {rank} could not connect to the others: {str(error).splitlines()[0]} "
            "(where another rank ended first, its log says why)"
        ) from error
    interconnects, backends = zip(*described)
    islands = Islands(interconnects, backends) if len(set(interconnects)) > 1 else None
    _check(islands, layout, mixes, device, store, rank, size)
    device.bind(index_on_node(rank, int(os.environ.get("LOCAL_RANK", "0")), interconnects) // on_one)
    prefix = dist.PrefixStore("erniekit", store)
    backend = device.backend if islands is None else ACROSS
    dist.init_process_group(backend, store=prefix, rank=rank, world_size=size, timeout=TALK)
    return islands


def _check_backend(device: Device) -> None:
    """Whether torch knows the collective backend that a device names: each rank's own, as their torch may differ."""
    import torch
    import torch.distributed as dist

    try:  # whole words, or one for each type: cpu:gloo,cuda:nccl
        named = [part.rpartition(":")[2] for part in device.backend.split(",")]
        unknown = [name for name in named if not dist.is_backend_available(name)]
        if not unknown:
            dist.distributed_c10d.BackendConfig(dist.Backend(device.backend))
    except (ValueError, AttributeError):  # two for one type, a word too many, no text
        unknown = [repr(device.backend)]
    if unknown:
        kind = type(device)
        owner = owner_of(kind.__module__)
        raise DeviceError(
            f"{device.name} names the collective backend {unknown[0]}, which torch {torch.__version__} does not have",
            where=f"{kind.__module__}.{kind.__name__}.backend" + (f", {owner}" if owner else ""),
            fix="nproc_per_node=1; for several ranks, install or import what brings the backend to torch "
            "(docs/adding-a-device.md)",
        )


def check_rank_variables(ranks: int) -> None:
    """Of one of WORLD_SIZE ranks, before torch looks for the others."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {ranks}, and {missing[0]} is not set",
            where="environment",
            fix="unset WORLD_SIZE, and erniekit train starts the ranks itself (nproc_per_node; NNODES); or give each "
            "rank RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )


def index_on_node(rank: int, local: int, interconnects: Sequence[str]) -> int:
    """Which device of its kind a rank takes: unlike ranks before it on the same machine take others."""
    return sum(interconnects[r] == interconnects[rank] for r in range(rank - local, rank))


def _check(
    islands: Islands | None, layout: Layout, mixes: bool, device: Device, store: Any, rank: int, size: int
) -> None:
    """The same error on every rank, before a collective between unlike devices hangs or crashes."""
    import torch.distributed as dist

    try:
        if islands is not None:
            _check_unlike(islands, layout, mixes)
        _check_backend(device)
    except ErnieKitError:
        # Rank 0 may be the store itself: it leaves after the others have read, or they would only see it vanish.
        with suppress(dist.DistError):  # one that has left by now needs no reply
            store.set(f"device/{rank}/read", "")
            if rank == 0:
                store.wait([f"device/{r}/read" for r in range(size)], PART)
        raise


def _check_unlike(islands: Islands, layout: Layout, mixes: bool) -> None:
    if not mixes:
        raise DeviceError(
            f"the ranks of this run compute on different devices ({islands.describe()})",
            where="device",
            fix="give every rank the same kind of device; where they are meant to differ, name them: "
            "islands: [gpu:8, iluvatar_gpu:8], with a pipeline across (docs/hardware/mixed.md)",
        )
    check_islands(islands, layout)


def leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
