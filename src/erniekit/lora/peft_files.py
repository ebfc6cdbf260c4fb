"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, one A and B for each public projection.

Called by adapter_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from erniekit.checkpoint.shards import write_json, write_shards
from erniekit.errors import CheckpointError
from erniekit.lora.adapter import Adapter, LowRank
from erniekit.lora.projections import short_names
from erniekit.lora.settings import LoRASettings
from erniekit.lora.stored import ONE_FILE, config_fields, paired, plain_number, rank_and_alpha, read_tensors

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

# Values of PEFT's config that change what the adapter computes, in ways these layers do not.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "use_dora": bool,
    "lora_bias": bool,
    "modules_to_save": bool,
    "target_parameters": bool,
    "trainable_token_indices": bool,
    "alora_invocation_tokens": bool,
    "layer_replication": bool,
    "bias": lambda value: value not in (None, "none"),
    # These subtract the start of the adapter from the base weights, which are then no longer the model's own.
    "init_lora_weights": lambda value: str(value).lower().startswith(("pissa", "olora", "loftq", "corda", "lora_ga")),
}


def write_peft(folder: Path, adapter: Adapter, model: nn.Module) -> list[Path]:
    odd_rank = {n: u.rank for n, u in adapter.updates.items() if u.rank != adapter.rank}
    odd_alpha = {
        n: u.scale * (u.rank**0.5 if adapter.rslora else u.rank)
        for n, u in adapter.updates.items()
        if u.rank != adapter.rank or u.scale != adapter.scale
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": plain_number(adapter.alpha),
        "lora_dropout": 0.0,
        "use_rslora": adapter.rslora,
        "target_modules": short_names(list(adapter.updates), model),
        "rank_pattern": {re.escape(n): rank for n, rank in odd_rank.items()},
        "alpha_pattern": {re.escape(n): alpha for n, alpha in odd_alpha.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
    }
    # Parts that share an A each get a copy: PEFT knows no sharing.
    tensors = {
        f"{PREFIX}{name}.lora_{side}.weight": value
        for name, update in adapter.updates.items()
        for side, value in (("A", update.A), ("B", update.B))
    }
    write_shards(folder, WEIGHTS.removesuffix(".safetensors"), tensors.items(), ONE_FILE)
    write_json(folder / CONFIG, config)
    return [folder / WEIGHTS, folder / CONFIG]


def read_peft(folder: Path) -> Adapter:
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
    rslora = bool(config.get("use_rslora", False))
    alphas = config.get("alpha_pattern") or {}
    updates = {}
    for name, (A, B) in paired(read_tensors(folder, [WEIGHTS]), str(folder)).items():
        own = next((v for k, v in alphas.items() if re.fullmatch(rf"(.*\.)?({k})", name)), alpha)
        r = A.shape[0]
        updates[name] = LowRank(A, B, LoRASettings(r, float(own), rslora).scaling)
    return Adapter(updates, rank, alpha, rslora, 1.0, config.get("base_model_name_or_path"), str(folder))
