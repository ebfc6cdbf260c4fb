"""The weight-name tables: exact inverses, every tensor of a model covered once, and the layouts' known traps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from erniekit.errors import ConfigError
from erniekit.lora.projections import short_name_of
from erniekit.models import MODELS, find
from erniekit.models.names import grouped_qkv

SIZES = {
    "vocab_size": 20,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
}
EXPERTS = {
    "moe_num_experts": 3,
    "moe_k": 2,
    "moe_intermediate_size": 4,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "num_nextn_predict_layers": 2,
}
VARIANTS = {
    "ernie_tied": {"model_type": "ernie4_5", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "ernie_untied_bias": {
        "model_type": "ernie4_5",
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "use_bias": True,
    },
    "ernie_tied_bias": {
        "model_type": "ernie4_5",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    "ernie_mha": {
        "model_type": "ernie4_5",
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "use_bias": True,
    },
    "ernie_moe": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 5,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "num_nextn_predict_layers": 2,
    },
    "ernie_moe_bare": {  # the 300B kind: no shared experts, its own head; here without a correction bias too
        "model_type": "ernie4_5_moe",
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "moe_num_experts": 3,
        "moe_k": 1,
        "moe_intermediate_size": 7,
        "moe_use_aux_free": False,
    },
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama_tied": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama_bias": {"model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "llama_fused": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "fuse_attention_qkv": True,
        "fuse_attention_ffn": True,
    },
    "llama_fused_bias": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "fuse_attention_qkv": True,
        "fuse_attention_ffn": True,
    },
    "moe": {"model_type": "ernie4_5_moe", "num_key_value_heads": 2, "tie_word_embeddings": True, **EXPERTS},
    "moe_plain": {
        "model_type": "ernie4_5_moe",
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        **EXPERTS,
        "moe_num_shared_experts": 0,
        "moe_use_aux_free": False,
        "num_nextn_predict_layers": 0,
    },
    "vl": {
        "model_type": "ernie4_5_moe_vl",
        "num_key_value_heads": 2,
        **EXPERTS,
        "moe_num_experts": [3, 3],
        "moe_intermediate_size": [4, 5],
        "freq_allocation": 1,
        "num_nextn_predict_layers": 0,
        "vision_config": {"depth": 2, "hidden_size": 8, "num_heads": 2, "mlp_ratio": 3, "patch_size": 2},
    },
}


def model_and_entries(variant: str, layout: str):
    raw = {**SIZES, **VARIANTS[variant]}
    spec = find(raw)
    config = spec.read_config(raw, layout, False, "config.json")
    return spec.build(config), spec.names(config, layout)


FURTHER = {"moe": ["hf_fused"], "vl": ["hf_fused", "hf_transformers"]}  # by a word of the variant
LAYOUTS = [
    (v, layout)
    for v in VARIANTS
    for layout in ("hf", "paddle", *(name for word, names in FURTHER.items() if word in v for name in names))
]


@pytest.mark.parametrize(("variant", "layout"), LAYOUTS)
def test_writing_and_reading_are_exact_inverses_for_every_tensor(variant, layout):
    model, entries = model_and_entries(variant, layout)
    for entry in entries:
        ours = torch.randn(model.state_dict()[entry.ours].shape)
        assert torch.equal(entry.read([t.contiguous() for t in entry.write(ours)]), ours), entry.ours


@pytest.mark.parametrize(("variant", "layout"), LAYOUTS)
def test_every_tensor_of_the_model_has_one_entry_and_no_name_is_used_twice(variant, layout):
    model, entries = model_and_entries(variant, layout)
    assert sorted(e.ours for e in entries if not e.copy_of) == sorted(model.state_dict())
    theirs = [name for e in entries for name in e.theirs]
    assert len(theirs) == len(set(theirs))


def test_a_tied_paddle_model_writes_its_head_a_second_time():
    _, entries = model_and_entries("ernie_tied", "paddle")
    copies = [e for e in entries if e.copy_of]
    assert [(e.ours, e.theirs, e.copy_of) for e in copies] == [
        ("embed.weight", ("lm_head.weight",), "ernie.embed_tokens.weight")
    ]
    embed = torch.randn(20, 12)
    assert copies[0].write(embed)[0].shape == (20, 12)  # [V, H], not transposed as an untied one is


def test_paddles_untied_head_is_transposed():
    _, entries = model_and_entries("ernie_untied_bias", "paddle")
    head = next(e for e in entries if e.theirs == ("lm_head.weight",))
    assert head.write(torch.randn(20, 12))[0].shape == (12, 20)


def test_gate_rows_come_before_up_rows_in_every_layout():
    gate, up = torch.full((10, 12), 1.0), torch.full((10, 12), 2.0)
    fused = torch.cat([gate, up])
    _, hf = model_and_entries("ernie_tied", "hf")
    entry = next(e for e in hf if e.ours == "layers.0.mlp.gate_up.weight")
    assert entry.theirs == ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    assert torch.equal(entry.write(fused)[0], gate)
    _, paddle = model_and_entries("ernie_tied", "paddle")
    entry = next(e for e in paddle if e.ours == "layers.0.mlp.gate_up.weight")
    assert torch.equal(entry.write(fused)[0], torch.cat([gate.t(), up.t()], dim=1))


def test_grouped_qkv_goes_kv_head_by_kv_head():
    """4 query heads, 2 kv heads of one channel: rows q0 q1 q2 q3 k0 k1 v0 v1 -> columns q0 q1 k0 v0 q2 q3 k1 v1."""
    entry = grouped_qkv("ours", "theirs", heads=4, kv_heads=2, head_dim=1)
    order = [0, 1, 4, 6, 2, 3, 5, 7]
    weight = torch.arange(8.0)[:, None].expand(8, 3)
    assert entry.write(weight)[0].shape == (3, 8)
    assert entry.write(weight)[0][0].tolist() == order
    assert entry.write(torch.arange(8.0))[0].tolist() == order  # a bias goes the same way


def test_ernies_ungrouped_qkv_goes_head_by_head_and_its_grouped_one_in_blocks():
    _, mha = model_and_entries("ernie_mha", "paddle")
    entry = next(e for e in mha if e.ours == "layers.0.attn.qkv.bias")
    q, k, v = (torch.arange(4).repeat_interleave(6) + 10 * n for n in (1, 2, 3))
    columns = entry.write(torch.cat([q, k, v]))[0][::6].tolist()
    assert columns == [10, 20, 30, 11, 21, 31, 12, 22, 32, 13, 23, 33]
    _, gqa = model_and_entries("ernie_tied", "paddle")
    entry = next(e for e in gqa if e.ours == "layers.0.attn.qkv.weight")
    weight = torch.randn(48, 12)
    assert torch.equal(entry.write(weight)[0], weight.t())


def test_lora_targets_are_names_of_the_table():
    for kind in MODELS:
        spec = MODELS.get(kind)
        variants = {"ernie4_5": "ernie_tied", "ernie4_5_moe": "ernie_moe", "ernie4_5_vl_moe": "vl", "llama": "llama"}
        _, entries = model_and_entries(variants[kind], "hf")
        projections = {short_name_of(n.rpartition(".")[0]) for e in entries for n in e.theirs}
        assert set(spec.lora_targets) <= projections


def test_experts_are_stored_one_by_one_fused_and_in_paddles_way():
    weight = torch.arange(3 * 8 * 12.0).view(24, 12)  # 3 experts, gate and up of 4 rows each
    found = {}
    for layout in ("hf", "hf_fused", "paddle"):
        _, entries = model_and_entries("moe", layout)
        found[layout] = next(e for e in entries if e.ours == "layers.1.mlp.experts.gate_up.weight")
    mlp = "layers.1.mlp.experts"
    assert found["hf"].theirs[:3] == tuple(
        f"model.{mlp}.{name}.weight" for name in ("0.gate_proj", "0.up_proj", "1.gate_proj")
    )
    assert torch.equal(found["hf"].write(weight)[3], weight[12:16])  # expert 1's up
    assert found["hf_fused"].theirs == (f"model.{mlp}.gate_up_proj",)
    assert torch.equal(found["hf_fused"].write(weight)[0][1], weight[8:16])
    assert found["paddle"].theirs[1] == f"ernie.{mlp}.1.up_gate_proj.weight"
    assert torch.equal(found["paddle"].write(weight)[1], weight[8:16].t())


def test_the_correction_bias_lives_elsewhere_in_fused_files():
    names = {}
    for layout in ("hf", "hf_fused", "paddle"):
        _, entries = model_and_entries("moe", layout)
        entry = next(e for e in entries if e.ours == "layers.1.mlp.router.bias")
        names[layout] = entry.theirs[0]
        assert entry.write(torch.zeros(3))[0].shape == (1, 3)
    assert names == {
        "hf": "model.layers.1.mlp.moe_statics.e_score_correction_bias",
        "hf_fused": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",
        "paddle": "ernie.layers.1.mlp.moe_statics.e_score_correction_bias",
    }


def test_a_family_without_a_paddle_layout_says_so():
    spec = replace(MODELS.get("llama"), paddle_prefix="")
    model, _ = model_and_entries("llama", "hf")
    assert len(spec.entries(model.config, "hf")) > 0
    with pytest.raises(ConfigError, match="have no Paddle layout"):
        spec.entries(model.config, "paddle")
