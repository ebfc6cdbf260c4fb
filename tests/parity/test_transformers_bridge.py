"""The bridge to transformers: the same memory, the same logits, and nothing left without values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError
from erniekit.models import find
from erniekit.models.init import init_weights
from parity.test_models_transformers import LLAMA3
from support.transformers_bridge import to_transformers

IDS = torch.tensor([[3, 70, 90, 101, 4, 200]])
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("name", ["dense_old", "dense_new", "llama_fused"])
def test_the_twin_gives_the_same_logits_from_the_same_memory(paddle, name):
    folder = ModelFolder(paddle / name)
    model = folder.build().eval()
    twin = to_transformers(model, folder.config)
    torch.testing.assert_close(twin(IDS).logits, model(IDS), atol=1e-5, rtol=1e-5)  # fp32, other summation order
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in twin.parameters()} == ours
    assert not twin.training


def test_experts_cross_the_bridge_and_layers_for_further_tokens_stay_behind(paddle):
    folder = ModelFolder(paddle / "moe_old")
    config = dataclasses.replace(folder.config, mtp_layers=1)
    model = folder.spec.build(config).eval()
    init_weights(model, 0, 0.15)
    twin = to_transformers(model, config)
    assert any(name.startswith("mtp.") for name in model.state_dict())
    torch.testing.assert_close(twin(IDS).logits, model(IDS), atol=1e-5, rtol=1e-5)


def test_a_change_of_our_weights_is_a_change_of_the_twin(paddle):
    folder = ModelFolder(paddle / "dense_new")
    model = folder.build()
    twin = to_transformers(model, folder.config)
    before = twin(IDS).logits.clone()
    with torch.no_grad():
        model.layers[1].attn.qkv.weight.mul_(1.5)
    assert not torch.allclose(twin(IDS).logits, before)
    torch.testing.assert_close(twin(IDS).logits, model(IDS), atol=1e-5, rtol=1e-5)


def test_a_tied_twin_is_tied(paddle):
    folder = ModelFolder(paddle / "dense_new")
    twin = to_transformers(folder.build(), folder.config)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": "llama", "rope_parameters": LLAMA3},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": False},
        {"model_type": "ernie4_5", "tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=["llama3_rope", "llama_bias", "ernie_bias", "ernie_linear_rope"],
)
def test_every_variant_crosses_the_bridge(extra):
    raw = {**SIZES, **extra}
    spec = find(raw)
    config = spec.read_config(raw, "hf", False, "config.json")
    model = spec.build(config).eval()
    init_weights(model, 0, 0.15)
    twin = to_transformers(model, config)
    torch.testing.assert_close(twin(IDS).logits, model(IDS), atol=1e-5, rtol=1e-5)


def test_bf16_stays_bf16_and_frequencies_stay_fp32(paddle):
    folder = ModelFolder(paddle / "dense_new")
    twin = to_transformers(folder.build(torch.bfloat16), folder.config)
    assert twin.dtype == torch.bfloat16
    assert twin.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_head_bias_transformers_does_not_have_is_refused():
    raw = {**SIZES, "model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": False}
    spec = find(raw)
    config = dataclasses.replace(spec.read_config(raw, "hf", True, "config.json"), head_bias=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.bias"):
        to_transformers(spec.build(config), config)
