"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, one A and B for each public projection.

Called by adapter_files.py and together.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint.shards import write_json, write_shards
from erniekit.errors import CheckpointError
from erniekit.lora import peft_experts
from erniekit.lora.adapter import Adapter, LowRank
from erniekit.lora.adapter_config import (
    ONE_FILE,
    config_fields,
    magnitudes,
    paired,
    patterns_of,
    plain_number,
    rank_and_alpha,
    read_tensors,
    refuse_other_names,
)
from erniekit.lora.projections import config_of, projections, short_names
from erniekit.lora.score_head import KEY as HEAD
from erniekit.lora.score_head import MODULES, headless, write_classes
from erniekit.lora.settings import LoRASettings
from erniekit.lora_scale import alpha_of

CONFIG, STEM, PREFIX = "adapter_config.json", "adapter_model", "base_model.model."
WEIGHTS = f"{STEM}.safetensors"

# Values of PEFT's config that change what the adapter computes, in ways these layers do not.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "lora_bias": bool,
    "modules_to_save": lambda value: bool(value) and not (isinstance(value, list) and set(value) <= set(MODULES)),
    "trainable_token_indices": bool,
    "alora_invocation_tokens": bool,
    "layer_replication": bool,
    "bias": lambda value: value not in (None, "none"),
    # These subtract the start of the adapter from the base weights, which are then no longer the model's own.
    "init_lora_weights": lambda value: str(value).lower().startswith(("pissa", "olora", "loftq", "corda", "lora_ga")),
}


def write_peft(folder: Path, adapter: Adapter, model: nn.Module) -> list[Path]:
    write_shards(folder, STEM, peft_tensors(adapter, model).items(), ONE_FILE)
    write_peft_settings(folder, adapter, model)
    return [folder / WEIGHTS, folder / CONFIG]


def peft_tensors(adapter: Adapter, model: nn.Module) -> dict[str, torch.Tensor]:
    """What is in adapter_model.safetensors. Parts that share an A each get a copy: PEFT has no sharing."""
    updates = _completed(adapter, model).updates
    tensors = {
        f"{PREFIX}{name}.lora_{side}.weight": value
        for name, update in updates.items()
        for side, value in (("A", update.A), ("B", update.B))
    }
    lengths = {name: update.magnitude for name, update in updates.items() if update.magnitude is not None}
    tensors |= {f"{PREFIX}{name}.lora_magnitude_vector": value for name, value in lengths.items()}
    if adapter.head is not None:
        tensors[HEAD] = adapter.head
    return tensors


def write_peft_settings(folder: Path, adapter: Adapter, model: nn.Module) -> None:
    """All but the tensors, of which shapes alone count."""
    whole = _completed(adapter, model)
    if peft_experts.has_experts(model):
        named = peft_experts.named(whole, model)
    else:
        updates = whole.updates
        ranks, scales = {n: u.rank for n, u in updates.items()}, {n: u.scale for n, u in updates.items()}
        named = peft_experts.Named(short_names(list(updates), model), [], ranks, scales)
    odd_rank = {n: rank for n, rank in named.ranks.items() if rank != adapter.rank}
    odd_alpha = {
        n: plain_number(alpha_of(scale, named.ranks[n], adapter.rslora))
        for n, scale in named.scales.items()
        if n in odd_rank or scale != adapter.scale
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if adapter.head is None else "SEQ_CLS",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": plain_number(adapter.alpha),
        "lora_dropout": 0.0,
        "use_rslora": adapter.rslora,
        "target_modules": named.target_modules,
        "target_parameters": named.target_parameters or None,
        "rank_pattern": peft_experts.patterns(odd_rank),
        "alpha_pattern": peft_experts.patterns(odd_alpha),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None if adapter.head is None else list(MODULES),
        "use_dora": adapter.dora,
    }
    if adapter.head is not None:
        write_classes(folder, config_of(model).labels)
    write_json(folder / CONFIG, config)


def _completed(adapter: Adapter, model: nn.Module) -> Adapter:
    return peft_experts.completed(adapter, model) if peft_experts.has_experts(model) else adapter


def read_peft(folder: Path, model: nn.Module) -> Adapter:
    where = str(folder / CONFIG)
    config = config_fields(folder / CONFIG)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"a {kind} adapter, not LoRA", where=where, fix="only LoRA adapters can be used")
    for key, is_on in _UNSUPPORTED.items():
        if is_on(config.get(key)):
            raise CheckpointError(
                f"the adapter uses {key}: {config[key]!r}, which changes more than low-rank updates",
                where=where,
                fix="merge it with peft (merge_and_unload) and use the merged model as base",
            )
    rank, alpha = rank_and_alpha(config, where)
    whole = LoRASettings(rank, alpha, bool(config.get("use_rslora", False)))
    alphas = patterns_of(config.get("alpha_pattern"), f"{where}, key alpha_pattern")

    def scale(rank: int, *names: str) -> float:
        """As PEFT scales a module or parameter that goes by these names."""
        own = next((v for k, v in alphas.items() for n in names if re.fullmatch(rf"(.*\.)?({k})", n)), None)
        found = LoRASettings(rank, alpha if own is None else float(own), whole.rslora).scaling
        return whole.scaling if abs(found - whole.scaling) < 1e-9 * found else found  # one way to write a number

    tensors = read_tensors(folder, [WEIGHTS])
    head = tensors.pop(HEAD, None)
    lengths = magnitudes(tensors, str(folder))
    if head is None and (config.get("modules_to_save") or config.get("task_type") == "SEQ_CLS"):
        refuse_other_names(tensors, str(folder))
        raise headless(folder)
    updates: dict[str, LowRank] = {}
    parameters = {p.public: peft_experts.parameter_of(p) for p in projections(model)}
    for name, (A, B) in paired(tensors, str(folder)).items():
        r, group = A.shape[0], peft_experts.fused_of(name, model, A, B)
        if group:
            experts = len({p.expert for p in group})
            updates |= peft_experts.unfused(group, A, B, scale(r // experts, parameters[group[0].public]))
        elif not peft_experts.is_left_out(name, A, B):
            fused = parameters.get(name, "")
            if fused.endswith(".gate_up_proj") and any(re.fullmatch(rf"(.*\.)?({k})", fused) for k in alphas):
                updates[name] = LowRank(A, B, scale(2 * r, fused))  # stacked with its other half
            else:
                updates[name] = LowRank(A, B, scale(r, name, fused))
    dora = bool(config.get("use_dora"))
    if set(lengths) != (set(updates) if dora else set()):
        raise CheckpointError(
            f"use_dora is {dora}; {len(lengths)} of {len(updates)} adapted layers have row lengths",
            where=where,
            fix="the file is incomplete: download or copy the adapter again",
        )
    updates |= {name: replace(updates[name], magnitude=value) for name, value in lengths.items()}
    return Adapter(updates, rank, alpha, whole.rslora, 1.0, config.get("base_model_name_or_path"), str(folder), head)
