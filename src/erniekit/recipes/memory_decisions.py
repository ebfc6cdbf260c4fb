"""What a run takes of a device's memory: how few layers must be computed again, and what to set where it does not fit.

Called by run_plan.py and speed_decisions.py once device, ranks and model are known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from erniekit.config import RunConfig
from erniekit.config.note import shown
from erniekit.devices import pick
from erniekit.devices.base import GIB, Device
from erniekit.errors import ConfigError
from erniekit.log import warn
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    activation_bytes,
    head_bytes,
    optimizer_bytes,
    parameters,
    recomputed_bytes,
    state_bytes,
)
from erniekit.parallel.mesh import World

USABLE = 0.92  # of a card's memory: the allocator's rounding and other libraries take the rest
FULL = 0.95  # of it that a run with nothing but whole-layer recompute may fill
HOST = 0.8  # of the host's memory that pinned states may take
SPARE = GIB  # kernels' own workspaces
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
    states = 0.0 if away else optimizer_bytes(cfg.optim.optim_states, cfg.optim.master_weights)
    if cfg.optim.update_in_backward:
        return states, GRADIENT_BYTES / model.num_layers  # a layer's at a time
    return states, SUMMED_BYTES if cfg.train.gradient_accumulation_steps > 1 else GRADIENT_BYTES


def least_bytes(cfg: RunConfig, model: DecoderConfig) -> float:
    """What a run on one device takes with every layer computed again."""
    tokens = cfg.train.per_device_train_batch_size * cfg.data.max_seq_len
    layers = range(model.num_layers)
    states = state_bytes(model, trained_share(cfg, model), *kept_bytes(cfg, model))
    again = model.num_layers * recomputed_bytes(model) * tokens
    one = 2 * max(activation_bytes(model, layer) for layer in layers) * tokens
    return states + head_bytes(model, cfg.memory.loss_subbatch_seqlen) + again + one + SPARE


def host_bytes(cfg: RunConfig, model: DecoderConfig) -> float:
    """What offloaded states take of the host's memory."""
    away = cfg.memory.offload_optim or cfg.memory.tensorwise_offload_optimizer
    each = optimizer_bytes(cfg.optim.optim_states, cfg.optim.master_weights)
    return parameters(model) * trained_share(cfg, model) * each if away else 0.0


def advise(cfg: RunConfig, device: Device, world: World, model: DecoderConfig, host: float | None = None) -> str | None:
    """Before anything is loaded: a full fine-tuning that cannot fit is told what would make it. It is tried all the
    same, as an estimate may be wrong. host: bytes of its memory; this machine's when not given."""
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
    for keys in LADDER:
        tried = changed(cfg, keys)
        if least_bytes(tried, model) <= limit and host_bytes(tried, model) <= host:
            missing = {key: value for key, value in keys.items() if cfg[key] != value}
            missing |= {} if cfg.memory.recompute else {"recompute": True}
            if keys.get("update_in_backward") and cfg.train.gradient_accumulation_steps > 1:
                missing["gradient_accumulation_steps"] = 1
            words = ", ".join(f"{key}: {shown(value)}" for key, value in missing.items())
            return f"set {words} ({least_bytes(tried, model) / GIB:.0f} GiB)"
    return "use fine_tuning: LoRA, or more devices with sharding: stage3"


def changed(cfg: RunConfig, keys: dict[str, Any]) -> RunConfig:
    """The run with these keys of its optimiser."""
    of_memory = {key: value for key, value in keys.items() if hasattr(cfg.memory, key)}
    of_optim = {key: value for key, value in keys.items() if key not in of_memory}
    return replace(cfg, optim=replace(cfg.optim, **of_optim), memory=replace(cfg.memory, **of_memory))


def trained_share(cfg: RunConfig, model: DecoderConfig) -> float:
    """Of the weights, how many are trained; an adapter's are a few in a hundred at most."""
    if not cfg.lora.lora:
        return 1.0
    return min(1.0, 2.0 * cfg.lora.lora_rank / model.hidden_size)


def layers_to_recompute(
    model: DecoderConfig,
    tokens: int,
    limit: float,
    trained: float,
    rows: int,
    state: float = OPTIMIZER_BYTES,
    gradient: float = GRADIENT_BYTES,
) -> int:
    """The fewest layers that must be computed again for a step to fit in `limit` bytes. state, gradient: bytes of a
    trained weight on the device."""
    fixed = state_bytes(model, trained, state, gradient) + head_bytes(model, rows)
    kept = [activation_bytes(model, layer) * tokens for layer in range(model.num_layers)]
    start = recomputed_bytes(model) * tokens  # what a layer that is computed again starts from
    most = max(kept)
    need = fixed + sum(kept) + 2 * most + SPARE  # and a layer's gradients and what they are made of
    for count in range(model.num_layers + 1):
        if need <= limit:
            return count
        if count < model.num_layers:
            need -= kept[count] - start
    return model.num_layers
