"""Sharding stages on torch's fully_shard: weights, gradients and states in pieces over the fsdp (and cp) ranks.

Called by apply.py after everything that changes weights' shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.model_contract import spread
from erniekit.parallel.mesh import World
from erniekit.parallel.packed_bytes import NAME as PACKED_BYTES


def shard_options(world: World, compute: torch.dtype, offload: bool = False) -> dict[str, Any]:
    """Of every fully_shard of this world: over which ranks, in which numbers, where shards live."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    layout, mesh = world.layout, world.mesh
    if layout.cp > 1:
        shard = mesh["fsdp", "cp"]._flatten("shard")
        mesh = mesh["dp", "shard"] if layout.dp > 1 else shard
    else:
        mesh = mesh["dp", "fsdp"] if layout.dp > 1 else mesh["fsdp"]
    # Trained weights stay fp32, their own masters, and are gathered in the compute dtype; frozen ones come in it.
    # Inputs stay as they are: fp32 ones, such as the cosines of positions, are meant to be.
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return dict(
        mesh=mesh,
        mp_policy=precision if compute != torch.float32 else MixedPrecisionPolicy(),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )


def apply_fsdp(parts: list[nn.Module], world: World, compute: torch.dtype, offload: bool) -> int:
    """Shards in place. Returns how many ranks a gradient is averaged over: the loss is multiplied by it."""
    layout = world.layout
    if layout.fsdp == 1:
        return 1
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _gather_uncast(PACKED_BYTES)
    options = shard_options(world, compute, offload)
    again = layout.sharding_stage == 3
    dealt: dict[str, Any] = {**options, "mesh": world.copies_mesh()} if layout.experts_over_data else {}
    in_fp32: dict[str, Any] = {**options, "mp_policy": MixedPrecisionPolicy()}
    for part in parts:
        for tower in spread(part).towers().values():
            tower.always_encodes = True  # no item, where a batch has none
        for block in spread(part).front():
            fully_shard(block, reshard_after_forward=again, **options)
        for _, layer in spread(part).held_layers():
            if layer.sparse:
                for bank in layer.mlp.banks():
                    # fp32, and kept gathered: it is small, and router losses read its weight as well.
                    fully_shard(bank.router, reshard_after_forward=False, **in_fp32)
                    if dealt:
                        fully_shard(bank.experts, reshard_after_forward=again, **dealt)
                if layer.mlp.correction is not None:
                    fully_shard(layer.mlp.correction, reshard_after_forward=False, **in_fp32)
            fully_shard(layer, reshard_after_forward=again, **options)
        for ahead in spread(part).mtp:  # in groups of their own: gathered where they are trained
            fully_shard(ahead, reshard_after_forward=again, **options)
        fully_shard(part, reshard_after_forward=False, **options)
    return layout.dp * layout.fsdp * layout.cp


def _gather_uncast(name: str) -> None:
    """Parameters of this name are gathered in their own dtype, whatever the others of their group are cast to: torch
    has no way to say so."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    plain = FSDPParam.init_dtype_attrs
    if hasattr(plain, "uncast"):
        return

    def init_dtype_attrs(param: Any, mp_policy: Any) -> None:
        plain(param, mp_policy)
        if param._module_info.param_name == name:
            param.param_dtype = None

    init_dtype_attrs.uncast = name  # type: ignore[attr-defined]
    FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign, assignment]


def set_sharing(parts: list[nn.Module], last: bool, world: World) -> None:
    """last: of the step's micro-batches. Stage 1 reduces gradients once a step, at that one; stages 2 and 3 after every
    one, to hold less. In stages 1 and 2 weights are gathered once a step, and stay so until then: the end of each
    forward pass, where memory is fullest, has them all anyway."""
    stage = world.layout.sharding_stage
    if world.layout.fsdp == 1 or stage == 3:
        return
    for part in parts:
        part.set_reshard_after_backward(last)  # type: ignore[operator]
        if stage == 1:
            part.set_requires_gradient_sync(last)  # type: ignore[operator]


def reshard(parts: list[nn.Module], world: World) -> None:
    """After a forward pass without backward weights may stay gathered, and what is loaded into the
    shards, or saved from them, would not be what is computed with."""
    if world.layout.fsdp > 1:
        for module in (m for part in parts for m in part.modules() if hasattr(m, "reshard")):
            module.reshard()  # type: ignore[operator]
