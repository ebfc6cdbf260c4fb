"""The decoder's own contract: shapes, the tied head, default positions, and the fused projections' public names."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from erniekit.models import find
from erniekit.models.init import init_weights

RAW = {
    "model_type": "ernie4_5",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def build(**changes):
    raw = {**RAW, **changes}
    spec = find(raw)
    model = spec.build(spec.read_config(raw, "hf", False, "config.json"))
    init_weights(model, 0, 0.1)
    return model


def test_logits_are_batch_length_vocab_and_labels_give_the_sum_of_their_losses():
    model, ids, labels = build(), torch.randint(0, 40, (3, 7)), torch.randint(0, 40, (3, 7))
    labels[0, :3] = -100
    logits = model(ids)
    assert logits.shape == (3, 7, 40)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, labels=labels), want, atol=1e-4, rtol=0)


def test_a_tied_head_is_the_embedding_itself():
    tied, untied = build(tie_word_embeddings=True), build(tie_word_embeddings=False)
    assert tied.head_weight() is tied.embed.weight
    assert "head.weight" not in tied.state_dict()
    assert untied.head_weight() is untied.head.weight


def test_positions_count_from_zero_when_not_given():
    model, ids = build(), torch.randint(0, 40, (2, 7))
    positions = torch.arange(7).expand(2, 7)
    torch.testing.assert_close(model(ids, positions), model(ids), atol=0, rtol=0)
    assert not torch.allclose(model(ids, positions * 2), model(ids))


def test_token_zero_trains_like_any_other():
    """transformers gives id 0 (padding there) no lookup gradient; ERNIEKit trains it, and so do we."""
    model = build(tie_word_embeddings=False)
    model(torch.tensor([[0, 5, 6]])).square().sum().backward()
    assert model.embed.weight.grad[0].any()
    assert not model.embed.weight.grad[1].any()


def test_fused_projections_name_their_parts_in_row_order():
    layer = build().layers[0]
    assert layer.attn.qkv.parts == (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
    assert layer.mlp.gate_up.parts == (("gate_proj", 48), ("up_proj", 48))


def test_a_model_whose_attention_was_swapped_asks_for_no_kernels_of_its_own():
    model, served = build(), build()
    assert model.attends_itself()
    model.layers[1].attn.inner = torch.nn.Identity()
    served.layers[0].attn.inner.with_positions = False
    assert not model.attends_itself()
    assert not served.attends_itself()
