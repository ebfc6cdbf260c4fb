"""config.json of ERNIE-4.5-VL: released sizes, the flat and the nested form, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from erniekit.errors import CheckpointError
from erniekit.models import MODELS, costs, find, vision_costs
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import TokenCounts

TOWER = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}
VL_28B: dict[str, Any] = {
    "model_type": "ernie4_5_moe_vl", "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
    "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "moe_num_experts": [64, 64], "moe_k": 6, "moe_intermediate_size": [1536, 512], "moe_num_shared_experts": 2,
    "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28], "rope_3d": True, "freq_allocation": 20,
    "im_patch_id": 100295, "vision_config": TOWER, "moe_use_hard_gate": True,
}  # fmt: skip
VL_424B = {
    **VL_28B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 54, "num_attention_heads": 64,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "moe_k": 8, "moe_intermediate_size": [3584, 1536],
    "moe_num_shared_experts": None, "moe_layer_start_index": [3, 3], "moe_layer_end_index": [53, 53],
}  # fmt: skip


def read(raw: dict[str, Any], **changes: Any) -> DecoderConfig:
    return find(raw).read_config({**raw, **changes}, "hf", False, "here/config.json")


@pytest.mark.parametrize(
    ("raw", "total", "tower", "text", "vision"),
    [
        (VL_28B, 29_399_294_336, 630_433_280, 3_352_150_208, 2_078_130_368),
        (VL_424B, 423_526_285_184, 630_433_280, 47_926_586_560, 27_391_811_008),
    ],
    ids=["28B", "424B"],
)
def test_released_shapes_have_their_published_counts(
    raw: dict[str, Any], total: int, tower: int, text: int, vision: int
) -> None:
    c = read(raw)
    assert (costs.parameters(c), costs.weights(c)["tower"]) == (total, tower)
    assert costs.active_parameters(c) == text
    assert costs.active_parameters(c, vision=True) == pytest.approx(vision, rel=1e-3)
    assert c.mrope == (22, 22, 20)
    assert c.sparse(c.num_layers - 1), "the end is past the last layer"


def test_flops_are_those_of_the_tokens_and_patches_seen() -> None:
    """spec: a text token 12.4 GFLOP with LoRA, a vision token 7.3 in the decoder, tower and resampler 5.3."""
    c = read(VL_28B)
    text, vision = (costs.step_flops(c, TokenCounts(1, 0, 0, seen), frozen_base=True) for seen in (0, 1))
    assert text == pytest.approx(12.4e9, rel=0.02)
    assert vision == pytest.approx(7.3e9, rel=0.02)
    seen = vision_costs.Patches(4, 0, 1)
    assert vision_costs.forward_flops(c, seen) == pytest.approx(5.3e9, rel=0.02)
    frozen, trained = (vision_costs.step_flops(c, seen, on, on) for on in (False, True))
    assert trained == 3 * frozen == 3 * vision_costs.forward_flops(c, seen)


@pytest.mark.parametrize("layout", ["hf", "paddle", "hf_transformers", "hf_fused"])
def test_every_form_says_the_same(layout: str) -> None:
    start = read(VL_28B, image_start_token_id=5, image_end_token_id=6)
    out = find(VL_28B).write_config(start, layout, "bfloat16")
    assert find(out) is MODELS.get("ernie4_5_vl_moe")
    assert replace(read(out), raw_layout="") == replace(start, raw_layout="")
    assert ("text_config" in out) == (layout in ("hf_transformers", "hf_fused"))


def test_a_flat_file_keeps_what_it_had_and_vllm_finds_its_lists() -> None:
    out = find(VL_28B).write_config(read(VL_28B, max_text_id=7), "hf", "bfloat16")
    assert out["max_text_id"] == 7
    assert out["moe_num_experts"] == [64, 64]
    assert out["moe_layer_end_index"] == [29, 28]
    assert out["im_patch_id"] == 100295
    assert out["rope_scaling"] == {"rope_type": "default", "mrope_section": [22, 22, 20]}, (
        "else positions have one axis"
    )


@pytest.mark.parametrize("kind", ["default", "mrope"])
def test_sections_of_the_rope_are_kept_as_a_release_names_them(kind: str) -> None:
    given = {"type": kind, "mrope_section": [22, 22, 20]}
    c = read(VL_28B, rope_scaling=given)
    assert (c.mrope, c.rope_scaling) == ((22, 22, 20), None)
    assert find(VL_28B).write_config(c, "hf", "bfloat16")["rope_scaling"] == given


@pytest.mark.parametrize("layout", ["hf", "paddle", "hf_transformers", "hf_fused"])
def test_scaled_positions_stay_scaled_in_every_form(layout: str) -> None:
    nested = find(VL_28B).write_config(read(VL_28B), "hf_fused", "bfloat16")
    nested["text_config"]["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    told = read(find(VL_28B).write_config(read(nested), layout, "bfloat16")).rope_scaling
    assert told is not None
    assert (told["rope_type"], told["factor"]) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"moe_num_experts": [64, 32]}, "moe_num_experts"),
        ({"moe_num_experts": [64]}, "moe_num_experts"),
        ({"moe_num_experts": "many"}, "moe_num_experts"),
        ({"moe_intermediate_size": [1536, -1]}, "moe_intermediate_size"),
        ({"moe_k": 65}, "moe_k"),
        ({"rope_3d": False}, "rope_3d"),
        ({"freq_allocation": 21}, "mrope_section"),
        ({"vision_config": None}, "hidden_size"),
        ({"vision_config": {**TOWER, "num_heads": 7}}, "num_heads"),
        ({"vision_config": {**TOWER, "hidden_act": "gelu"}}, "hidden_act"),
        ({"spatial_conv_size": 3}, "spatial_merge_size"),
        ({"moe_layer_end_index": [1, "x"]}, "moe_layer_end_index"),
    ],
)
def test_what_would_need_other_arithmetic_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(VL_28B, **changes)
    assert key in str(caught.value.where)


UNEVEN = ["dense", *["sparse"] * 2, *["dense"] * 24, "sparse"]


@pytest.mark.parametrize("kinds", [["dense"] * 28, ["sparse"] * 27, UNEVEN])
def test_a_list_of_layers_must_be_one_that_we_can_build(kinds: list[str]) -> None:
    nested = find(VL_28B).write_config(read(VL_28B), "hf_fused", "bfloat16")
    nested["text_config"]["mlp_layer_types"] = kinds
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        read(nested)


def test_the_preprocessors_mean_and_deviation_are_the_towers() -> None:
    spec, c = find(VL_28B), read(VL_28B)
    assert spec.preprocessed is not None
    told = spec.preprocessed(c, {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}, "p.json").vision
    assert told is not None
    assert (told.mean, told.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    for bad in ({"image_std": [1, 0, 1]}, {"image_mean": [1]}, {"do_normalize": False}):
        with pytest.raises(CheckpointError):
            spec.preprocessed(c, bad, "p.json")
