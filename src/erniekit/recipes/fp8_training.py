"""FP8 training: which layers round their products, and the scales that go with them (docs/fp8-qat.md).

Called by build.py (`install`, on the model without memory) and training.py (`scales_of`, on the built one).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from erniekit.config import RunConfig
from erniekit.data.types import Batch
from erniekit.kernels.stored.fp8_static import StaticFormat
from erniekit.log import emit
from erniekit.models.layers.experts import ExpertLinear
from erniekit.models.layers.linear import HoldsWeight, Linear
from erniekit.models.layers.rounding import BlockRounding, StaticRounding
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.sharding_table import plain
from erniekit.recipes.built import Built
from erniekit.train.fp8_scales import Moving, StaticScales

ERNIEKIT_HIGHEST = 488.0  # that its quantiser takes for the highest number of e4m3: the largest weights are clipped
FIRST_TOKENS = 2048  # that the first scales are taken from


def install(cfg: RunConfig, model: nn.Module, sharding: Sharding) -> None:
    """Every linear of the layers and all experts; the head, embeddings, norms, routers and layers that predict further
    tokens stay as they are."""
    static = cfg.precision.compute_type == "fp8"
    if not static and not cfg.quant.use_fp8:
        return
    form, whole = form_of(cfg), []
    for name, layer in rounded_layers(model):
        if not static:
            layer.rounding = BlockRounding()
            continue
        block = 0 if isinstance(layer, ExpertLinear) else form.block
        if block and any(width % block for _, width in sharding.matrix_shapes(f"{name}.weight")):
            whole.append(name)
            block = 0
        layer.rounding = StaticRounding(StaticFormat(block, form.rows, form.weights))
    if whole:
        emit(
            f"note     apply_hadamard: {whole[0]} and {len(whole) - 1} more are not rotated (widths are not multiples)"
        )


def form_of(cfg: RunConfig) -> StaticFormat:
    q = cfg.quant
    gradient = "e5m2" if q.fp8_format_type == "hybrid" else "e4m3"
    return StaticFormat(
        q.hadamard_block_size if q.apply_hadamard else 0,
        gradient if q.quant_input_grad else "",
        gradient if q.quant_weight_grad else "",
    )


def rounded_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """By the names that shardings and weight tables have for them."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, (Linear, ExpertLinear)):
            yield plain(f"{name}.").removesuffix("."), module


def scales_of(cfg: RunConfig, built: Built, first: Batch) -> StaticScales | None:
    """The scales of a run with compute_type fp8, taken from its first tokens; None of any other. All ranks call it."""
    if cfg.precision.compute_type != "fp8":
        return None
    layers: dict[str, HoldsWeight] = {}
    for part in built.engine.parts:
        for name, layer in rounded_layers(part):
            if layer.rounding is not None and layer.weight is not None:
                layers[name] = layer
                experts = layer.experts if isinstance(layer, ExpertLinear) else 1
                layer.rounding.give_memory(experts, built.device.handle)
    q = cfg.quant
    highest = ERNIEKIT_HIGHEST if cfg.compat.fp8_as_recorded else Moving.highest
    moving = Moving(q.apply_online_actscale_step, q.actscale_moving_rate, highest)
    scales = StaticScales(layers, built.sharding, built.world, moving, built.dtype)
    ids: torch.Tensor = first.input_ids[:1, :FIRST_TOKENS]
    scales.measure(lambda: built.engine.logits(ids))
    return scales
