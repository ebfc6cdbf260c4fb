"""What a model with experts, or with layers that predict further tokens (MTP), is given beyond a dense one.

Called by recipes/build.py and fit.py, in this order: `settle_config`, `set_further`, `put_in`, `balance_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.log import say
from erniekit.losses.moe_balance import Balance, Weights
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.padding import EvenPadding
from erniekit.models.layers.router import Router
from erniekit.parallel.collectives import sum_from
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local
from erniekit.parallel.mesh import AXES, World
from erniekit.parallel.recompute import recompute_blocks
from erniekit.train.expert_balance import ExpertBalance

if TYPE_CHECKING:
    from erniekit.recipes.build import Built

BIAS = "e_score_correction_bias"
IGNORED = (
    "moe_use_aux_free: False: routing ignores the bias this model was released with, so other experts are chosen than "
    "where it is served"
)


def settle_config(cfg: RunConfig, folder: ModelFolder) -> None:
    """Keys that change what is built, into the folder's config."""
    _settle_further(cfg, folder)
    moe = folder.config.moe
    if moe is None:
        return
    most = None if cfg.moe.expert_max_capacity >= 2**32 else cfg.moe.expert_max_capacity
    moe = replace(moe, fewest=cfg.moe.expert_min_capacity, most=most)
    if cfg.moe.moe_use_aux_free is False and moe.bias:
        if cfg.compat.unused_router_bias_is_dropped:
            say(f"note     {IGNORED}; saved models lack it (compat: erniekit)")
            moe = replace(moe, bias=False)
            folder.files = {name: file for name, file in folder.files.items() if not name.endswith(BIAS)}
        else:
            say(f"note     {IGNORED}; saved models keep it, and config.json says that it is off")
        moe = replace(moe, biased=False)
    folder.config = replace(folder.config, moe=moe)


def _settle_further(cfg: RunConfig, folder: ModelFolder) -> None:
    asked, held = cfg.model.num_nextn_predict_layers, folder.config.mtp_layers
    if asked and cfg.train.stage == "DPO":
        raise ConfigError(
            "preference training scores answers; it does not train layers that predict further tokens",
            where="num_nextn_predict_layers",
            fix="leave it out: those layers are kept as they are",
        )
    from_nothing = not cfg.model.continue_training and folder.config.moe is not None
    if from_nothing and cfg.given("num_nextn_predict_layers"):
        folder.config = replace(folder.config, mtp_layers=asked)
    elif asked and asked != held:
        raise ConfigError(
            f"num_nextn_predict_layers is {asked}, this model has {held or 'no'} layers that predict further tokens",
            where=f"num_nextn_predict_layers, {folder.path}",
            fix=f"set it to {held} to train those" + (", or 0 to leave them as they are" if held else ""),
        )


def further(cfg: RunConfig, config: DecoderConfig) -> int:
    """How many further tokens are trained: all the model's layers for them, or none."""
    asked = cfg.model.num_nextn_predict_layers
    if not cfg.model.continue_training and not cfg.given("num_nextn_predict_layers") and cfg.train.stage != "DPO":
        asked = config.mtp_layers  # nobody has trained them before
    return asked if cfg.model.multi_token_pred_lambda else 0


def set_further(cfg: RunConfig, model: Any) -> None:
    """Trained with their weight, or at rest: carried along and saved as they came."""
    if not model.config.mtp_layers:
        return
    trained = further(cfg, model.config) > 0
    model.mtp_weight = cfg.model.multi_token_pred_lambda if trained else 0.0
    model.mtp.requires_grad_(trained)


def weights_of(cfg: RunConfig) -> Weights:
    m = cfg.moe
    return Weights(m.moe_aux_loss_lambda, m.moe_z_loss_lambda, m.moe_orthogonal_loss_lambda)


def tells(cfg: RunConfig, config: DecoderConfig) -> tuple[str, ...]:
    """What these layers add to a step's numbers."""
    routers = weights_of(cfg).tells() if config.moe is not None else ()
    return (*routers, "mtp_loss") if further(cfg, config) else routers


def put_in(cfg: RunConfig, engine: Engine) -> None:
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
    for _, block in blocks(parts):
        block.balance = Balance(weights_of(cfg), share, sum_over, rows_over, piece, whole_batch=whole)
    if compat.padding_attends_evenly and weights_of(cfg).tells() and layout.cp == 1 and layout.tp == 1:
        for part in parts:
            for each in (layer for layer in part.layers if hasattr(layer, "attn")):
                each.attn.inner = EvenPadding(each.attn.inner)
    whole_layers = cfg.memory.recompute and cfg.memory.recompute_granularity == "full"
    if cfg.moe.use_recompute_moe and not whole_layers:
        recompute_blocks(block for _, block in blocks(parts))
    if cfg.model.use_recompute_mtp:
        recompute_blocks(ahead.block for part in parts for ahead in getattr(part, "mtp", ()))


def blocks(parts: list[Any]) -> Iterator[tuple[int, MoE]]:
    """(layer, block) of every MoE block that this rank holds a part of."""
    for part in parts:
        for number, layer in enumerate(part.layers):
            if isinstance(getattr(layer, "mlp", None), MoE):
                yield number, layer.mlp


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
    biases = {}
    for name, param in built.parameters():
        if step and name.endswith("router.bias"):
            biases[int(name.split(".")[1])] = (local(param.detach()), built.sharding.boxes(name, world.rank))
    layers = [i for i in range(config.num_layers) if config.sparse(i)]
    # Without sequence parallelism tensor-parallel ranks route the same tokens.
    group = world.joined(*AXES) if world.layout.sequence_parallel else engine.loss_group
    return ExpertBalance(engine, layers, moe.experts, group, step, biases)


def bias_step(cfg: RunConfig, config: DecoderConfig) -> float:
    """How far the bias moves in a step. Adapters are saved without it, so with LoRA it stays; in fine-tuning, whose
    data need not be even over the experts, it moves only where it is asked to. ERNIEKit moves it in pre-training."""
    assert config.moe is not None
    if cfg.lora.lora or not (config.moe.bias and config.moe.biased):
        return 0.0
    asked = cfg.given("moe_use_aux_free_update_coef") and not cfg.compat.router_bias_moves_in_pretraining_only
    return cfg.moe.moe_use_aux_free_update_coef if asked or cfg.train.stage == "PT" else 0.0


def ignore_bias(cfg: RunConfig, model: nn.Module) -> None:
    """For commands that run a finished model: `moe_use_aux_free: False` there too."""
    routers = [m for m in model.modules() if isinstance(m, Router) and m.bias is not None]
    if cfg.moe.moe_use_aux_free is False and any(r.biased for r in routers):
        say(f"note     {IGNORED}")
        for router in routers:
            router.biased = False
