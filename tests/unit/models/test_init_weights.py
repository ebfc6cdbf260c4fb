"""Random weights: a function of seed and name only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erniekit.models import find
from erniekit.models.init import init_weights

RAW = {
    "model_type": "ernie4_5",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "use_bias": True,
}


def make(seed: int) -> dict[str, torch.Tensor]:
    spec = find(RAW)
    model = spec.build(spec.read_config(RAW, "paddle", True, "config.json"))
    init_weights(model, seed, 0.02)
    return model.state_dict()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    one, same, other = make(1), make(1), make(2)
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])


def test_a_tensor_does_not_depend_on_what_is_built_beside_it():
    alone = nn.ModuleDict({"embed": nn.Embedding(300, 64)})
    init_weights(alone, 1, 0.02)
    assert torch.equal(alone["embed"].weight, make(1)["embed.weight"])


def test_matrices_have_the_asked_spread_norms_are_one_and_biases_zero():
    state = make(3)
    for name, value in state.items():
        if value.ndim == 2:
            assert float(value.std()) == pytest.approx(0.02, rel=0.05)  # 4,096 values or more: 1.1 % expected error
        else:
            assert torch.equal(value, torch.zeros_like(value) if "bias" in name else torch.ones_like(value)), name
    assert not torch.equal(state["layers.0.mlp.down.weight"], state["layers.1.mlp.down.weight"])
