"""The result: safetensors in compressed-tensors' or bitsandbytes' layout, and the config.json that declares it.

Called by run.py. Written without those libraries; tests read the files with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import DTYPE_NAMES, write_generation_config
from erniekit.checkpoint.quantised import KEY
from erniekit.checkpoint.shards import write_json, write_shards
from erniekit.quant_schemes import QuantRecipe, Scheme
from erniekit.quantize.layer_weights import is_quantised

# A reader takes the first group that names experts, or the first of a class: so theirs stands first. This pattern is
# met by no shared expert.
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
LAYOUT = "hf"  # a tensor for each expert: the only one whose names these formats have


def quantization_config(recipe: QuantRecipe, source: ModelFolder) -> dict[str, Any]:
    moe, ignored = source.config.moe is not None, ignored_modules(source)
    if recipe.rest.number == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": DTYPE_NAMES[source.dtype()],
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ignored,
        }
    groups = [(["Linear"], recipe.rest)]
    if moe and recipe.experts != recipe.rest:
        groups.insert(0, ([EXPERTS], recipe.experts))
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.rest.format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {f"group_{k}": _group(*group) for k, group in enumerate(groups)},
        "ignore": ignored,
    }


def _group(targets: list[str], scheme: Scheme) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": scheme.number,
        "symmetric": True,
        "strategy": scheme.strategy,
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    if scheme.is_mxfp4:
        weights["scale_dtype"] = "torch.uint8"
    inputs = None
    if scheme.inputs:
        inputs = {
            "num_bits": scheme.bits,
            "type": scheme.number,
            "symmetric": True,
            "strategy": scheme.inputs,
            "group_size": None,
            "dynamic": scheme.inputs == "token",
        }
    return {"targets": targets, "weights": weights, "input_activations": inputs, "output_activations": None,
            "format": scheme.format}  # fmt: skip


def ignored_modules(source: ModelFolder) -> list[str]:
    """Linears of the files that stay plain: the head, routers, and the layers that predict further tokens."""
    config, out = source.config, ["lm_head"]
    if config.moe is not None:
        out += [f"model.layers.{k}.mlp.gate" for k in range(config.num_layers) if config.sparse(k)]
    for k in range(config.mtp_layers):
        block = f"model.mtp_block.{k}"
        out += [f"{block}.self_attn.{p}_proj" for p in "qkvo"]
        out += [f"{block}.mlp.{p}_proj" for p in ("gate", "up", "down")]
        out.append(f"model.mtp_linear_proj.{k}")
    return out


def write_weights(
    folder: Path,
    source: ModelFolder,
    recipe: QuantRecipe,
    parts_of: Callable[[int], dict[str, torch.Tensor]],
    max_shard_size: float,
) -> None:
    """Weights, config.json and generation_config.json. parts_of: a layer's quantised tensors, called in order."""
    plain = {entry.ours: entry for entry in source.entries() if not entry.copy_of}
    config, spec = source.config, source.spec

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        at, parts = -1, {}
        for entry in spec.names(config, LAYOUT):
            number, inside = layer_of(entry.ours)
            if number >= 0 and is_quantised(inside):
                if number != at:
                    at, parts = number, parts_of(number)
                prefixes = tuple(name.removesuffix("weight") for name in entry.theirs)
                yield from ((name, parts[name]) for name in parts if name.startswith(prefixes))
            elif not entry.copy_of:
                yield from zip(entry.theirs, entry.write(source.read(plain[entry.ours])), strict=True)

    write_shards(folder, "model", tensors(), max_shard_size)
    config_json = spec.write_config(config, LAYOUT, DTYPE_NAMES[source.dtype()])
    config_json[KEY] = quantization_config(recipe, source)
    write_json(folder / "config.json", config_json)
    write_generation_config(folder, config)


def layer_of(name: str) -> tuple[int, str]:
    """("layers.3.attn.out.weight") -> (3, "attn.out.weight"); (-1, name) outside of the layers."""
    first, _, rest = name.partition(".")
    number, _, inside = rest.partition(".")
    return (int(number), inside) if first == "layers" else (-1, name)
