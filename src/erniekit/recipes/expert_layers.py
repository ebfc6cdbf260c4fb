"""What a model with experts, or with layers that predict further tokens (MTP), is given beyond a dense one.

Called by recipes/build.py and training.py, `install` first, then `balance_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from erniekit.config import RunConfig
from erniekit.log import emit
from erniekit.losses.moe_balance import RouterLosses
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.padding import EvenPadding
from erniekit.models.layers.router import Router
from erniekit.parallel.collectives import sum_from
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local
from erniekit.parallel.layout import AXES
from erniekit.parallel.mesh import World
from erniekit.parallel.recompute import recompute_blocks
from erniekit.recipes.built import Built
from erniekit.recipes.expert_settings import IGNORED, bias_step, weights_of
from erniekit.train.expert_balance import ExpertBalance

TEXT, VISION = "text", "vision"


def install(cfg: RunConfig, engine: Engine) -> None:
    """Router losses, counting and recompute into the spread model. All ranks call it: groups are made here."""
    parts: list[Any] = engine.parts
    config: DecoderConfig = parts[0].config
    if config.moe is None and not config.mtp_layers:
        return
    layout, compat = engine.world.layout, cfg.compat
    records: list[Any] = []
    for part in parts:
        part.records = records  # the engine reads one list
    share = engine.router_share
    if compat.router_losses_per_micro_batch:  # each micro-batch counts whole, however many a step has
        share = torch.full_like(share, engine.averaged_over / layout.data_ranks)
    sum_over, rows_over = _sum_over_rows(engine.world)
    piece = (engine.world.at["tp"], layout.tp) if layout.sequence_parallel else (0, 1)
    whole = compat.router_losses_per_micro_batch
    for bank, modality in banks(parts):
        weights = weights_of(cfg, modality == VISION)
        bank.balance = RouterLosses(weights, share, sum_over, rows_over, piece, whole, modality is not None)
    balanced = any(weights_of(cfg, vision).metric_names() for vision in (False, True))
    if compat.padding_attends_evenly and balanced and layout.cp == 1 and layout.tp == 1:
        for part in parts:
            for _, layer in part.held_layers():
                layer.attn.inner = EvenPadding(layer.attn.inner)
    whole_layers = cfg.memory.recompute and cfg.memory.recompute_granularity == "full"
    if cfg.moe.use_recompute_moe and not whole_layers:
        recompute_blocks(block for _, block in blocks(parts))
    if cfg.model.use_recompute_mtp:
        recompute_blocks(ahead.block for part in parts for ahead in part.mtp)


def blocks(parts: list[Any]) -> Iterator[tuple[int, nn.Module]]:
    """(layer, block) of every layer with experts that this rank holds a part of."""
    for part in parts:
        yield from ((number, layer.mlp) for number, layer in part.held_layers() if layer.sparse)


def banks(parts: list[Any]) -> Iterator[tuple[MoE, str | None]]:
    """Every router with its experts, and whose tokens it takes where a layer has two."""
    for _, block in blocks(parts):
        found = list(block.banks())  # type: ignore[operator]
        yield from zip(found, (TEXT, VISION) if len(found) > 1 else (None,))


def _sum_over_rows(world: World) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """The sum over ranks that hold other tokens of the same rows, and how many they are."""
    layout = world.layout
    axes = [axis for axis, on in (("cp", layout.cp > 1), ("tp", layout.sequence_parallel)) if on]
    group = world.joined(*axes) if axes else None
    return lambda x: sum_from(x, group), group.size() if group is not None else 1


def balance_hook(cfg: RunConfig, built: Built) -> ExpertBalance | None:
    config, world, engine = built.folder.config, built.world, built.engine
    moe = config.moe
    if moe is None:
        return None
    step = bias_step(cfg, config)
    routed = [n for n, p in built.parameters() if ".router." in n and p.requires_grad]
    trained = {int(name.split(".")[1]) for name in routed}  # of a frozen router the bias stays, too
    biases = {}
    for name, param in built.parameters():
        if step and name.endswith(("router.bias", "correction.bias")) and int(name.split(".")[1]) in trained:
            biases[int(name.split(".")[1])] = (local(param.detach()), built.sharding.boxes(name, world.rank))
    layers = [i for i in range(config.num_layers) if config.sparse(i)]
    # Without sequence parallelism tensor-parallel ranks route the same tokens.
    group = world.joined(*AXES) if world.layout.sequence_parallel else engine.loss_group
    experts = (moe.experts,) if moe.vision is None else (2, moe.experts)
    return ExpertBalance(engine, layers, experts, group, step, biases)


def ignore_bias(cfg: RunConfig, model: nn.Module) -> None:
    """For commands that run a finished model: `moe_use_aux_free: False` there too."""
    config: Any = model.config
    routers = [m for m in model.modules() if isinstance(m, Router) and m.biased]
    if cfg.moe.moe_use_aux_free is False and routers and config.moe.bias:
        emit(f"note     {IGNORED}")
        for router in routers:
            router.biased = False
