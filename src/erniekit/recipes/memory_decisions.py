"""What a run takes of a device's memory: how few layers must be computed again, and what to set where it does not fit.

Called by run_plan.py and speed_decisions.py once device, ranks and model are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from erniekit.config import RunConfig
from erniekit.config.note import Note, shown
from erniekit.devices import pick
from erniekit.devices.base import GIB, Device
from erniekit.errors import ConfigError
from erniekit.kernels.stored import multiplied_in_fp8
from erniekit.log import warn
from erniekit.models import vision_costs
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import (
    GRADIENT_BYTES,
    MOMENT_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    adapter_weights,
    layer_products,
    optimizer_bytes,
    packed_bytes,
    parameters,
    unpacking_bytes,
    weight_bytes,
)
from erniekit.models.vision_parts import FREEZE_RESAMPLER, FREEZE_VISION
from erniekit.parallel.mesh import World
from erniekit.planner.activations import LayerKernels
from erniekit.planner.memory import USABLE, HeldBytes, RankWork, fewest_recomputed, layers_of, recomputing, step_bytes
from erniekit.printable import counted
from erniekit.recipes import trained_weights
from erniekit.recipes.other_models import other_model_bytes
from erniekit.weight_kinds import BF16

FULL = 0.95  # of it that a run with nothing but whole-layer recompute may fill
HOST = 0.8  # of the host's memory that pinned states may take
SUMMED_BYTES = 4  # of a gradient that several micro-batches are added to

# What lets a run fit that does not, the least loss first: exact masters lose nothing, moments in 8 bit little, updates
# in backward the exact clip, and without masters weights are rounded.
EXACT: dict[str, Any] = {"master_weights": "exact16"}
LIGHT: dict[str, Any] = {"optim_states": "8bit", **EXACT}
LADDER: tuple[dict[str, Any], ...] = (
    EXACT,
    LIGHT,
    {**LIGHT, "update_in_backward": True},
    {**LIGHT, "offload_optim": True},
    {**LIGHT, "master_weights": "none"},
    {**LIGHT, "master_weights": "none", "update_in_backward": True},
)

MUON_LADDER: tuple[dict[str, Any], ...] = ({"offload_optim": True}, {"optim": "adamw", **LIGHT})


def check_backward_updates(cfg: RunConfig, world: World) -> None:
    if cfg.optim.update_in_backward and world.size > 1:
        raise ConfigError(
            f"update_in_backward lets a gradient go at once, and {world.size} ranks add theirs up after backward",
            where=cfg.origin("update_in_backward"),
            fix="run it on one device, or set update_in_backward: False (sharding: stage3 spreads gradients)",
        )


def kept_bytes(cfg: RunConfig, model: DecoderConfig) -> tuple[float, float]:
    """Of a trained weight on the device: the optimiser's states, and the gradient."""
    away = cfg.memory.offload_optim or cfg.memory.tensorwise_offload_optimizer
    states = 0.0 if away else states_bytes(cfg, model)
    if cfg.optim.update_in_backward:
        return states, GRADIENT_BYTES / model.num_layers  # a layer's at a time
    return states, SUMMED_BYTES if cfg.train.gradient_accumulation_steps > 1 else GRADIENT_BYTES


def states_bytes(cfg: RunConfig, model: DecoderConfig) -> float:
    """Of a trained weight, on average: masters and moments. Of Muon's matrices only the average is known."""
    each = optimizer_bytes(cfg.optim.optim_states, cfg.optim.master_weights)
    if cfg.optim.optim != "muon":
        return each
    return each - MOMENT_BYTES["fp32"] / 2 * trained_weights.muon_share(cfg, model)


def least_bytes(cfg: RunConfig, model: DecoderConfig) -> float:
    """What a run on one device takes with every layer computed again."""
    tokens = cfg.train.per_device_train_batch_size * cfg.data.max_seq_len
    held = bytes_held(model, trained_share(cfg, model), *kept_bytes(cfg, model), base_of(cfg))
    held = held._replace(weights=held.weights + other_model_bytes(cfg, model))
    rank = cfg.lora.lora_rank if cfg.lora.lora else 0
    vision = vision_bytes(cfg, model, again=True)
    work = bytes_worked(model, tokens, cfg.memory.loss_subbatch_seqlen, rank, vision, rows_in_fp8(cfg))
    return step_bytes(model, held, recomputing(work, model.num_layers)).total


def vision_bytes(cfg: RunConfig, model: DecoderConfig, again: bool) -> float:
    """What tower and resampler keep of a micro-batch, were it pictures throughout: there are packs that nearly are.
    again: their blocks are computed again, as with recompute of whole layers they are."""
    v = model.vision
    if v is None or cfg.train.stage not in ("VL-SFT", "DPO"):
        return 0.0
    rows, most = cfg.train.per_device_train_batch_size, cfg.vision.max_patches or cfg.data.max_seq_len * v.merge**2
    tower = not cfg.lora.lora and FREEZE_VISION not in cfg.vision.freeze_config
    resampler = cfg.lora.lora or FREEZE_RESAMPLER not in cfg.vision.freeze_config
    each = 4 if cfg.precision.compute_type == "fp32" else 2
    return vision_costs.kept_bytes(model, rows * most, tower, resampler, again, each)


def bytes_held(model: DecoderConfig, trained: float, state: float, gradient: float, base: str) -> HeldBytes:
    """What one device holds of a run, by the planner's account. trained: share of the weights; state, gradient: bytes
    of a trained weight on the device."""
    count, frozen = parameters(model) * trained, trained < 1
    layers = [sum(p.weights for p in layer_products(model, sparse)) for sparse in set(layers_of(model))]
    return HeldBytes(
        weights=weight_bytes(model, base) + (WEIGHT_BYTES * count if frozen else 0.0),
        optimiser=state * count,
        gradients=gradient * count,
        layer_gradients=WEIGHT_BYTES * max(layers) * trained,
        head_gradient=0.0 if frozen else 4.0 * model.vocab_size * model.hidden_size,
        from_start=gradient == SUMMED_BYTES,
        unpacked=unpacking_bytes(model, base),
    )


def bytes_worked(
    model: DecoderConfig, tokens: int, rows: int, rank: int, vision: float = 0.0, rows_fp8: bool = False
) -> RankWork:
    return RankWork(
        layers=layers_of(model),
        tokens=tokens,
        head_rows=rows,
        head_tokens=tokens,
        vocabulary=model.vocab_size,
        kernels=LayerKernels(rank=rank, rows_fp8=rows_fp8),
        vision_kept=vision,
    )


def host_bytes(cfg: RunConfig, model: DecoderConfig) -> float:
    """What offloaded states take of the host's memory."""
    away = cfg.memory.offload_optim or cfg.memory.tensorwise_offload_optimizer
    each = states_bytes(cfg, model)
    return parameters(model) * trained_share(cfg, model) * each if away else 0.0


def advise(cfg: RunConfig, device: Device, world: World, model: DecoderConfig, host: float | None = None) -> str | None:
    """Before anything is loaded: a warning for a full fine-tuning run that cannot fit, with the keys that would make
    it. The run goes on all the same, as an estimate may be wrong. host: bytes of host memory; None: this machine's."""
    if world.size > 1 or cfg.lora.lora or not device.counts_memory or cfg.precision.compute_type != "bf16":
        return None
    limit = FULL * device.total_memory
    need = least_bytes(cfg, model)
    if need <= limit:
        return None
    what = f"all {parameters(model) / 1e9:.1f} billion weights on one device take {need / GIB:.0f} GiB of its"
    host = host or pick("cpu").total_memory
    line = f"{what} {device.total_memory / GIB:.0f}: {advice(cfg, limit, HOST * host, model)}"
    warn(line)
    return line


def advice(cfg: RunConfig, limit: float, host: float, model: DecoderConfig) -> str:
    for keys in LADDER if cfg.optim.optim != "muon" else MUON_LADDER:
        tried = changed(cfg, keys)
        if least_bytes(tried, model) <= limit and host_bytes(tried, model) <= host:
            missing = {key: value for key, value in keys.items() if cfg[key] != value}
            missing |= {} if cfg.memory.recompute else {"recompute": True}
            if keys.get("update_in_backward") and cfg.train.gradient_accumulation_steps > 1:
                missing["gradient_accumulation_steps"] = 1
            settings = ", ".join(f"{key}: {shown(value)}" for key, value in missing.items())
            return f"set {settings} ({least_bytes(tried, model) / GIB:.0f} GiB)"
    return "use fine_tuning: LoRA, or more devices with sharding: stage3"


def limit_of(cfg: RunConfig, device: Device) -> float:
    """Bytes of the device that decisions plan with; 0: unknown."""
    return cfg.memory.memory_limit * GIB if cfg.memory.memory_limit else (device.total_memory or 0) * USABLE


def gib(size: float) -> str:
    """Bytes as GiB for a line of text: never a zero for something that is there."""
    found = size / GIB
    return f"{found:,.1f}" if found >= 10 else f"{found:.2g}"


def tell_too_low(cfg: RunConfig, weights: float, least: float, room: float) -> None:
    """Of a memory_limit that a rank cannot keep to. weights, least: bytes of it, with every layer computed again. room:
    bytes that the decision planned with."""
    if cfg.memory.memory_limit and least > room:
        works = math.ceil(least / GIB * 1000) / 1000
        warn(
            f"memory_limit: {cfg.memory.memory_limit:g} (GiB) is too low: weights alone take {gib(weights)} GiB of a "
            f"rank; the least that works is memory_limit: {works}, with every layer computed again; the run takes what "
            "it needs"
        )


def host_layers(cfg: RunConfig, device: Device, world: World, model: DecoderConfig) -> Iterator[Note]:
    """How many layers' packed weights are kept in host memory: as the user sets, else as few as make the rest fit."""
    requested, base = cfg.memory.frozen_layers_in_host, base_of(cfg)
    if base == BF16:
        if requested:
            reason = "weights that are not packed stay on the device; frozen_base packs them"
            yield Note("frozen_layers_in_host", requested, 0, reason)
        return
    count, reason = min(requested or 0, model.num_layers), ""
    if requested and requested > count:
        yield Note("frozen_layers_in_host", requested, count, f"the model has {counted(count, 'layer')}")
    limit = limit_of(cfg, device) if device.counts_memory or cfg.memory.memory_limit else 0.0
    if requested is None and limit and world.size == 1:
        sizes = [packed_bytes(model, layer, base) for layer in range(model.num_layers)]
        missing = least_bytes(cfg, model) - limit
        if missing > 0:  # buffers of two layers stay on the device for those that are away
            away = sorted(sizes, reverse=True)
            count = next((n for n in range(1, len(sizes) + 1) if sum(away[:n]) - 2 * away[0] >= missing), len(sizes))
            gone = sum(away[:count])
            reason = f"{gib(gone)} GiB of packed weights wait in host memory so that the rest fits {gib(limit)} GiB"
            tell_too_low(cfg, weight_bytes(model, base), limit + missing - (gone - 2 * away[0]), limit)
    if requested is None:
        yield Note("frozen_layers_in_host", None, count, reason or "everything fits", quiet=not count)
    if count and not (cfg.memory.recompute and cfg.memory.recompute_granularity == "full"):
        reason = "layers whose weights wait in host memory are computed again in backward"
        yield Note("recompute", cfg.memory.recompute, True, reason)
        yield Note("recompute_granularity", cfg.memory.recompute_granularity, "full", reason, quiet=True)
    if count and cfg.memory.no_recompute_layers:
        reason = "layers whose weights wait in host memory are computed again in backward"
        kept = tuple(n for n in cfg.memory.no_recompute_layers if n not in numbers_of(model, count, base))
        yield Note("no_recompute_layers", cfg.memory.no_recompute_layers, kept, reason)


def numbers_of(model: DecoderConfig, count: int, base: str) -> tuple[int, ...]:
    """Which layers these are: of the largest ones, spread evenly, so that copies have time between them."""
    sizes = [packed_bytes(model, layer, base) for layer in range(model.num_layers)]
    largest = [n for n, size in enumerate(sizes) if size == max(sizes)]
    of_them = min(count, len(largest))
    some = [largest[(2 * k + 1) * len(largest) // (2 * of_them)] for k in range(of_them)]
    others = [n for n in range(model.num_layers) if n not in largest]
    return tuple(sorted([*some, *others[: count - of_them]]))


def changed(cfg: RunConfig, keys: dict[str, Any]) -> RunConfig:
    """The run with these keys of its optimiser."""
    of_memory = {key: value for key, value in keys.items() if hasattr(cfg.memory, key)}
    of_optim = {key: value for key, value in keys.items() if key not in of_memory}
    return replace(cfg, optim=replace(cfg.optim, **of_optim), memory=replace(cfg.memory, **of_memory))


def trained_share(cfg: RunConfig, model: DecoderConfig) -> float:
    """Of the weights, how many are trained; of adapters as many as there are on every projection."""
    if cfg.tuning.partial and not cfg.lora.lora:
        return trained_weights.share(cfg, model)
    return min(1.0, adapter_weights(model, cfg.lora.lora_rank) / parameters(model)) if cfg.lora.lora else 1.0


def rows_in_fp8(cfg: RunConfig) -> bool:
    """Whether experts multiply rows rounded to fp8."""
    return multiplied_in_fp8(base_of(cfg), cfg.lora.frozen_products, "experts")


def base_of(cfg: RunConfig) -> str:
    """What frozen weights are kept as."""
    return cfg.lora.frozen_base if cfg.lora.packed_base else BF16


def layers_to_recompute(
    model: DecoderConfig,
    tokens: int,
    limit: float,
    trained: float,
    rows: int,
    state: float = OPTIMIZER_BYTES,
    gradient: float = GRADIENT_BYTES,
    base: str = BF16,
    rank: int = 0,
    vision: float = 0.0,
    rows_fp8: bool = False,
) -> int:
    """The fewest layers that must be computed again for a step to fit in `limit` bytes. state, gradient: bytes of a
    trained weight on the device. base: of frozen weights. rank: of adapters. vision: bytes that tower and resampler
    keep. rows_fp8: experts multiply rows rounded to fp8."""
    held = bytes_held(model, trained, state, gradient, base)
    return fewest_recomputed(model, held, bytes_worked(model, tokens, rows, rank, vision, rows_fp8), limit)
