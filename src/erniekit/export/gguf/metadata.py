"""A model's shape as GGUF keys, and what llama.cpp has no key for: refused by name. Called by run.py."""

from __future__ import annotations

from typing import Any

from erniekit.errors import CheckpointError
from erniekit.log import warn
from erniekit.models.config import DecoderConfig

ARCHITECTURES = {"ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe", "llama": "llama"}


def check_expressible(c: DecoderConfig, where: str) -> None:
    """Raises for a model that llama.cpp would refuse, or load and compute something else with."""
    problem = ""
    if c.family not in ARCHITECTURES:
        problem = f"this model is of family {c.family}; erniekit writes GGUF files of {', '.join(ARCHITECTURES)}"
    elif reason := _inexpressible(c):
        problem = f"llama.cpp cannot compute this model: {reason}"
    if problem:
        raise CheckpointError(
            problem,
            where=where,
            fix="export it with format=safetensors, for transformers, vLLM and `erniekit server`",
        )
    if c.moe and c.moe.capacity:
        warn(
            "moe_capacity is not kept: in llama.cpp experts take every token, and answers differ where one was dropped"
        )


def _inexpressible(c: DecoderConfig) -> str:
    if c.head_bias:
        return "its head has a bias"
    if c.family != "llama" and (c.attention_bias or c.mlp_bias):
        return "its ERNIE has no biases (use_bias)"
    if c.family != "llama" and c.rope_scaling and c.rope_scaling["rope_type"] == "llama3":
        return "its ERNIE has no llama3 rope scaling"
    last = c.num_layers - 1
    if c.moe and not all(c.sparse(i) for i in range(c.moe.start, last + 1)):
        return f"from layer {c.moe.start} on each must have experts (moe_layer_interval, moe_layer_end_index)"
    return ""


def shape_fields(c: DecoderConfig) -> dict[str, Any]:
    """Keys of the architecture. Python types choose GGUF's: int is uint32, float is float32."""
    arch = ARCHITECTURES[c.family]
    out: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "block_count": c.num_layers,
        "context_length": c.max_positions,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(c.rope_theta),
    }
    if c.rope_scaling and c.rope_scaling["rope_type"] == "linear":
        out |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(c.rope_scaling["factor"])}
    if c.moe is not None:
        out |= {
            "expert_count": c.moe.experts,
            "expert_used_count": c.moe.choices,
            "expert_feed_forward_length": c.moe.width,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": c.moe.start,
        }
        if c.moe.shared_width:
            out |= {
                "expert_shared_count": c.moe.shared_width // c.moe.width,
                "expert_shared_feed_forward_length": c.moe.shared_width,
            }
    return {f"{arch}.{key}": value for key, value in out.items()}
