"""The shape of a decoder small enough to build in a test, with experts in some of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from erniekit.models.config import DecoderConfig, MoEShape

_PLAIN = DecoderConfig(
    family="ernie4_5_moe", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True,
    max_positions=64,
)  # fmt: skip


def with_experts(moe: MoEShape, **changes: Any) -> DecoderConfig:
    return replace(_PLAIN, moe=moe, **changes)
