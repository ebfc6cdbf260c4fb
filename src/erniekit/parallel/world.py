"""Joining the other ranks: which layout the numbers ask for, and the process group under it.

Called once by a recipe; inside a worker torch's launcher has set RANK, WORLD_SIZE and where to meet.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import pairwise
from typing import Any

from erniekit.errors import DeviceError, PlanError
from erniekit.parallel.mesh import Layout, World, fit

MEET = timedelta(minutes=10)  # for all ranks to start
TALK = timedelta(minutes=30)  # for one collective: loading a large model keeps ranks apart


def layout_of(parallel: Any, ranks: int | None = None) -> Layout:
    """From the parallel section's values. `ranks`: how many there will be; where not given, how many there are. Only
    sharding over "all that is left" (a degree below 1) asks for them: `fit` says whether the product comes out even."""
    words = set(parallel.sharding)
    stage = next((k for k in (3, 2, 1) if f"stage{k}" in words), 1)
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
    )


def _stage_cuts(method: tuple[str, ...], pp: int, virtual: int) -> tuple[int, ...]:
    """`[0,29,57]` counts pipeline entries: the embedding is entry 0, layer i entry i + 1, then norm and head."""
    numbers = [word.strip(" []") for word in method]
    if pp == 1 or not numbers or not all(n.isdigit() for n in numbers):
        return ()
    bounds = [int(n) for n in numbers]
    if len(bounds) != pp * virtual + 1:
        raise PlanError(
            f"pp_seg_method has {len(bounds) - 1} stages, the pipeline {pp * virtual}",
            where="pp_seg_method, pipeline_parallel_degree",
            fix=f"give {pp * virtual + 1} bounds, or leave pp_seg_method out for even stages",
        )
    return tuple(bound - 1 for bound in bounds[1:-1])


def check_model(layout: Layout, num_layers: int) -> None:
    stages = layout.pp * layout.virtual_stages
    if stages > num_layers:
        raise PlanError(
            f"pipeline_parallel_degree={layout.pp} x {layout.virtual_stages} stages a rank needs {stages} layers or "
            f"more; this model has {num_layers}",
            where="pipeline_parallel_degree, virtual_pp_degree",
            fix=f"use {num_layers} stages or fewer",
        )
    bounds = [0, *layout.stage_cuts, num_layers]
    if layout.stage_cuts and any(b <= a for a, b in pairwise(bounds)):
        raise PlanError(
            f"pp_seg_method leaves a stage without layers, or goes past the model's {num_layers}",
            where="pp_seg_method",
            fix=f"bounds rise from 0 to {num_layers + 3} (embedding, {num_layers} layers, norm, head)",
        )


def ranks_started() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_world(parallel: Any, device_type: str) -> World:
    """This process's place; joins the group when there are others."""
    size = ranks_started()
    layout = fit(size, layout_of(parallel))
    rank = int(os.environ.get("RANK", "0")) if size > 1 else 0
    world = World(layout, rank, device_type)
    if size > 1:
        _join(rank, size, device_type)
        first_here = int(os.environ.get("LOCAL_RANK", "0")) == 0
        world.leaders = [r for r, first in enumerate(world.gather(first_here)) if first]
    return world


def _join(rank: int, size: int, device_type: str) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    store, rank, size = next(iter(dist.rendezvous("env://", rank, size, timeout=MEET)))
    store.set(f"device/{rank}", device_type)
    kinds = {r: store.get(f"device/{r}").decode() for r in range(size)}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{kind}: ranks {[r for r, k in kinds.items() if k == kind]}" for kind in set(kinds.values()))
        raise DeviceError(
            f"the ranks of this run compute on different devices ({told})",
            where="device",
            fix="give every rank the same kind of device; one job on unlike devices is not in this version",
        )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    prefix = dist.PrefixStore("erniekit", store)
    dist.init_process_group(backend, store=prefix, rank=rank, world_size=size, timeout=TALK)


def leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
