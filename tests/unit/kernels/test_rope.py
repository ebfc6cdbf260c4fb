"""Rotary positions against transformers' formulas, to the bit in bf16, and both stretched frequency tables."""

from __future__ import annotations

import pytest
import torch
from transformers import Ernie4_5Config, LlamaConfig
from transformers.models.ernie4_5 import modeling_ernie4_5 as hf_ernie
from transformers.models.llama import modeling_llama as hf_llama

from erniekit.kernels.rope import cos_sin, inverse_frequencies, rotate_halves, rotate_pairs

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "module", "rotate"),
    [
        (Ernie4_5Config(**SIZES), (hf_ernie, hf_ernie.Ernie4_5RotaryEmbedding), rotate_pairs),
        (LlamaConfig(**SIZES), (hf_llama, hf_llama.LlamaRotaryEmbedding), rotate_halves),
    ],
    ids=["ernie", "llama"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(config, module, rotate, dtype):
    torch.manual_seed(0)
    theirs, embedding = module
    q, k = torch.randn(2, 9, 4, 32).to(dtype), torch.randn(2, 9, 2, 32).to(dtype)
    positions = torch.randint(0, 4096, (2, 9))
    their_cos, their_sin = embedding(config=config)(q, positions)
    expected = theirs.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), their_cos, their_sin)
    theta = config.rope_parameters["rope_theta"]
    cos, sin = cos_sin(positions, inverse_frequencies(32, theta, None, CPU))
    assert cos.dtype == torch.float32
    for ours, other in zip((q, k), expected):
        got = rotate(ours, cos, sin)
        assert got.dtype == dtype
        # fp32 may fuse a multiply and an add on either side; bf16 rounds the same value on both.
        close = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(got.transpose(1, 2), other, **close)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}])
def test_stretched_frequencies_equal_transformers(scaling):
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(scaling))
    expected = hf_llama.LlamaRotaryEmbedding(config=config).inv_freq
    ours = inverse_frequencies(128, scaling["rope_theta"], scaling, CPU)
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)
    plain = inverse_frequencies(128, scaling["rope_theta"], None, CPU)
    assert not torch.equal(ours, plain)


@pytest.mark.parametrize("rotate", [rotate_pairs, rotate_halves])
def test_scores_depend_only_on_the_distance(rotate):
    """The reason rotary positions may restart in every document."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    freq = inverse_frequencies(32, 10000.0, None, CPU)

    def score(i: int, j: int) -> torch.Tensor:
        at = [cos_sin(torch.tensor([[p]]), freq) for p in (i, j)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()

    torch.testing.assert_close(score(7, 3), score(107, 103), atol=1e-4, rtol=1e-4)  # angles near 100 rad in fp32
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3
