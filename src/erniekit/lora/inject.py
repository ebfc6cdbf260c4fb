"""Putting adapters into a model, and which of its weights are theirs afterwards.

Called by recipes/build.py (training) and through adapter.py by chat, export and the API.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import nn

from erniekit.errors import ConfigError
from erniekit.lora.dora import DoRALinear
from erniekit.lora.layers import (
    SHARED,
    LoRALayer,
    LoRALinear,
    LoRARouter,
    Pair,
    experts_of,
    kind_of,
    layer_parts,
    weight_like,
)
from erniekit.lora.projections import Projection, config_of, select
from erniekit.lora.settings import LoRASettings
from erniekit.models.score_head import WEIGHT as SCORE


class PairShape(NamedTuple):
    rank: int
    scale: float
    magnitudes: bool = False  # DoRA
    starts: bool = False  # PiSSA


def inject(model: nn.Module, settings: LoRASettings, seed: int) -> list[Projection]:
    """Adapters on every projection the settings name; all other weights but a score head's are frozen. Returns what was
    adapted."""
    chosen = select(model, settings.targets)
    shape = PairShape(settings.rank, settings.scaling, settings.dora, settings.pissa)
    wrap(model, dict.fromkeys(chosen, shape), settings.shared_a)
    reset_lora(model, seed)
    if config_of(model).labels:
        model.get_submodule("score").requires_grad_(True)  # new, and no part of the base: it is trained whole
    return chosen


def wrap(model: nn.Module, shapes: dict[Projection, PairShape], shared_a: bool) -> None:
    """Swap each layer that holds a named projection for its LoRALayer; B is zero, so the model's outputs are as before.

    All experts of a layer go together: of one projection either each of them is in `shapes`, alike, or none.
    """
    for param in model.parameters():
        param.requires_grad_(False)
    by_module: dict[str, dict[str, Projection]] = {}
    for projection in shapes:
        by_module.setdefault(projection.module, {}).setdefault(projection.part, projection)
    usual = next(model.parameters()).dtype
    for name, named in by_module.items():
        parts = list(named.values())
        base = model.get_submodule(name)
        kind, weight, shape = kind_of(base), weight_like(base, usual), shapes[parts[0]]
        assert kind is not None, f"{name} is adapted already"
        if shape.magnitudes or shape.starts:
            kind = _of_linears(kind, shape, parts[0], model)
        # A router keeps fp32 weights in a 16-bit model; its adapters are saved with all others, so they are as those.
        dtype = usual if kind is LoRARouter else None
        groups = [(SHARED, parts)] if shared_a and len(parts) > 1 else [(p.part, [p]) for p in parts]
        pairs = {
            key: Pair(
                tuple((p.part, p.rows) for p in group),
                *shapes[group[0]][:2],
                weight,
                experts_of(base),
                dtype,
                shape.starts,
                shape.magnitudes,
            )
            for key, group in groups
        }
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(base, layer_parts(base, parts[0].part), pairs))


def _of_linears(kind: type[LoRALayer], shape: PairShape, p: Projection, model: nn.Module) -> type[LoRALayer]:
    """DoRA and PiSSA are of plain linears; PEFT has DoRA, in a model with experts, on attention only."""
    sparse = config_of(model).moe is not None
    if kind is LoRALinear and not (shape.magnitudes and sparse and ".self_attn." not in p.public):
        return DoRALinear if shape.magnitudes else kind
    what = "use_dora" if shape.magnitudes else "lora_init: pissa"
    where = "attention" if shape.magnitudes and sparse else "attention, dense and shared feed-forward layers"
    raise ConfigError(
        f"{what} does not adapt {p.public}: in this model it is for {where}",
        where="lora_target_modules",
        fix="lora_target_modules: q_proj,k_proj,v_proj,o_proj, or leave it to plain LoRA",
    )


def reset_lora(model: nn.Module, seed: int) -> None:
    """Fresh adapters. Each pair, of each expert, draws from its own generator, seeded by its name: no order or layout
    changes them.

    A meta model is not changed: call this again once it has memory.
    """
    fresh = [
        (pair, [f"{seed}/{each}.lora.{key}.A" for each in _experts(name, pair)])
        for name, module in lora_linears(model)
        for key, pair in module.pairs().items()
        if not pair.A.is_meta
    ]
    with ThreadPoolExecutor() as pool:  # a generator is slow, and draws without holding Python's lock
        list(pool.map(lambda one: one[0].reset(*map(generator_of, one[1])), fresh))


def _experts(name: str, pair: Pair) -> list[str]:
    return [f"{name}.{e}" for e in range(pair.experts)] if pair.experts > 1 else [name]


def generator_of(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def lora_linears(model: nn.Module) -> list[tuple[str, LoRALayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoRALayer)]


def is_lora(name: str) -> bool:
    return ".lora." in name


def in_adapter(name: str) -> bool:
    """Weights that an adapter's files hold: low-rank updates, and a score head."""
    return is_lora(name) or name == SCORE


def is_lora_b(name: str) -> bool:
    """The parameters whose learning rate LoRA+ multiplies."""
    return is_lora(name) and name.endswith(".B")


def lora_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a LoRA checkpoint saves, by our names: the adapters alone, with a score head where there is one."""
    return {name: param for name, param in model.named_parameters() if in_adapter(name)}


def base_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The frozen weights under the names they have in a model without adapters: what weight tables read and fill."""
    adapted = {f"{name}.base" for name, _ in lora_linears(model)}
    out = {}
    for name, tensor in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".")
        if not is_lora(name):
            out[f"{prefix.removesuffix('.base')}.{leaf}" if prefix in adapted else name] = tensor
    return out
