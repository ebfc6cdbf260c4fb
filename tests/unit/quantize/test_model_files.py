"""The written files against the rules of those who read them: groups, ignored modules, scales of fused tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match
from safetensors.torch import load_file
from transformers.integrations.compressed_tensors import get_experts_scheme

from erniekit.quant_schemes import QUANT_RECIPES


def told(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


OFTEN = ("w4w8a16", "fp8_static", "mxfp4")
KINDS = [pytest.param(k, marks=() if k in OFTEN else pytest.mark.full) for k in QUANT_RECIPES if k != "nf4"]


@pytest.mark.parametrize("quant", KINDS)
def test_compressed_tensors_accepts_the_config_and_every_plain_linear_is_ignored_by_it(
    quant: str, moe, quantised, tmp_path: Path
) -> None:
    quantised(moe, quant, rows=1, compensate=False, measuring=[])
    config = QuantizationConfig.model_validate(told(tmp_path / "out"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    stored = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    plain = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2} - stored
    plain -= {"model.embed_tokens"}
    assert plain
    linear = torch.nn.Linear(1, 1)
    for module in plain:
        assert is_match(module, linear, config.ignore), module
    assert not any(is_match(module, linear, config.ignore) for module in stored)
    assert all(
        any(is_match(module, linear, group.targets) for group in config.config_groups.values()) for module in stored
    )


def test_experts_have_the_first_group_and_no_shared_expert_is_taken_for_one(moe, quantised, tmp_path: Path) -> None:
    quantised(moe, "w4w8a16", rows=0)
    config = QuantizationConfig.model_validate(told(tmp_path / "out"))
    first, second = config.config_groups.values()
    assert (first.weights.num_bits, second.weights.num_bits) == (4, 8)
    assert get_experts_scheme(config).weights.num_bits == 4
    linear = torch.nn.Linear(1, 1)
    # vLLM matches the unfused names of a layer's first expert, and all three must agree.
    for name in ("gate", "up", "down"):
        assert is_match(f"model.layers.1.mlp.experts.0.{name}_proj", linear, first.targets)
        assert not is_match(f"model.layers.1.mlp.shared_experts.{name}_proj", linear, first.targets)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, columns in (("experts.0.gate_proj", 128 // 8), ("shared_experts.gate_proj", 128 // 4)):
        assert tensors[f"model.layers.1.mlp.{name}.weight_packed"].shape[1] == columns


def test_static_fp8_has_one_scale_for_each_fused_tensor_and_one_input_scale_for_all_experts(
    moe, quantised, tmp_path: Path
) -> None:
    """vLLM requantises fused tensors to their largest scale, and takes the largest input scale of all experts."""
    quantised(moe, "fp8_static", rows=2)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    fused = [[f"model.layers.{k}.self_attn.{p}_proj" for p in "qkv"] for k in range(2)]
    places = ["model.layers.0.mlp", *(f"model.layers.1.mlp.experts.{e}" for e in range(8))]
    places.append("model.layers.1.mlp.shared_experts")
    fused += [[f"{place}.{p}_proj" for p in ("gate", "up")] for place in places]
    for modules in fused:
        scales = [tensors[f"{module}.weight_scale"] for module in modules]
        largest = torch.stack(scales).max()
        for module, scale in zip(modules, scales):
            assert scale.shape == (1,)
            codes = tensors[f"{module}.weight"]
            again = (codes.float() * scale / largest).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8)), module
        assert len({float(tensors[f"{module}.input_scale"]) for module in modules}) == 1
    for parts in (("gate", "up"), ("down",)):
        names = [f"model.layers.1.mlp.experts.{e}.{p}_proj.input_scale" for e in range(8) for p in parts]
        assert len({float(tensors[name]) for name in names}) == 1
    assert len({float(tensors[f"model.layers.1.mlp.experts.{e}.up_proj.weight_scale"]) for e in range(8)}) == 8


def test_nf4_names_the_modules_bitsandbytes_must_leave_alone(dense, quantised, tmp_path: Path) -> None:
    quantised(dense, "nf4", rows=0)
    config = told(tmp_path / "out")
    assert config["bnb_4bit_quant_type"] == "nf4"
    assert "lm_head" in config["llm_int8_skip_modules"]
