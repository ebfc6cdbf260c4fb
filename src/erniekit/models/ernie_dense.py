"""ERNIE-4.5 dense (0.3B): config, assembly and weight names. Registered in models/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from erniekit.models.config import DecoderConfig, hf_dtype, hf_rope
from erniekit.models.fields import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH, Fields
from erniekit.models.layers.decoder import PLAN, Decoder
from erniekit.models.names import Entry, grouped_qkv, hf_decoder_names, rows, transposed, verbatim
from erniekit.models.spec import ModelSpec

Experts = Callable[[DecoderConfig, str, str], list[Entry]]  # our prefix, theirs


def read_config(raw: dict[str, Any], layout: str, has_head: bool, where: str) -> DecoderConfig:
    f = Fields(raw, where)
    f.only("hidden_act", "silu", "swish")
    f.only("use_rmsnorm", True)
    theta, scaling = f.rope(500000.0)
    ratio = f.number("compression_ratio", 1.0, 1e-6, 1e9)
    if layout == "paddle" and ratio != 1.0:
        scaling = {"rope_type": "linear", "factor": ratio}  # positions / ratio
    # Each world's classes default head_dim and tying differently; never guess where the files show it.
    heads, kv_heads, head_dim = f.heads(128 if layout == "hf" else None)
    bias = f.flag("use_bias", False)
    return DecoderConfig(
        family="ernie4_5",
        vocab_size=f.need("vocab_size", MAX_VOCABULARY),
        hidden_size=f.need("hidden_size", MAX_WIDTH),
        intermediate_size=f.need("intermediate_size"),
        num_layers=f.need("num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=f.number("rms_norm_eps", 1e-5, 0.0, 1.0),
        rope_theta=theta,
        rope_style="pairs",
        tie_word_embeddings=f.flag("tie_word_embeddings", not has_head),
        max_positions=f.size("max_position_embeddings", 131072, 1, MAX_POSITIONS),
        attention_bias=bias,
        mlp_bias=bias,
        # One flag for every projection in Paddle; transformers' dense class leaves its head without.
        head_bias=bias and layout == "paddle",
        init_std=f.number("initializer_range", 0.02, 0.0, 100.0),
        rope_scaling=scaling,
        bos_id=f.token("bos_token_id", 1),
        eos_id=f.token("eos_token_id", 2),
        pad_id=f.token("pad_token_id", 0),
        raw=raw,
        raw_layout=layout,
    )


def write_config(c: DecoderConfig, layout: str, dtype: str) -> dict[str, Any]:
    shape = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "max_position_embeddings": c.max_positions,
        "use_bias": c.mlp_bias,
        "initializer_range": c.init_std,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.raw.get("eos_token_id", c.eos_id),
        "pad_token_id": c.pad_id,
    }
    kept = c.raw if c.raw_layout == layout else {}
    if layout == "paddle":
        kind = {
            "architectures": ["Ernie4_5_ForCausalLM"],
            "model_type": "ernie4_5",
            "rope_theta": c.rope_theta,
        }
        return {**kind, **kept, **shape, **paddle_rope(c), "dtype": dtype}
    kind = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_act": "silu"}
    return {**kept, **kind, **shape, **hf_rope(c), **hf_dtype(dtype)}


def paddle_rope(c: DecoderConfig) -> dict[str, Any]:
    """ERNIEKit has one scaling, `compression_ratio`: positions divided by it, which is linear scaling."""
    if c.rope_scaling and c.rope_scaling["rope_type"] == "linear":
        return {"rope_theta": c.rope_theta, "compression_ratio": c.rope_scaling["factor"]}
    return {"rope_theta": c.rope_theta, **({"rope_scaling": c.rope_scaling} if c.rope_scaling else {})}


def _paddle_qkv(c: DecoderConfig, ours: str, theirs: str) -> Entry:
    """[in, out] in Q | K | V blocks as ours; without grouped heads ERNIEKit goes head by head: q, k, v of each."""
    if c.num_heads == c.num_kv_heads:
        return grouped_qkv(ours, theirs, c.num_heads, c.num_kv_heads, c.head_dim)
    return transposed(ours, theirs)


def names(c: DecoderConfig, layout: str) -> list[Entry]:
    if layout == "hf":
        return hf_decoder_names(c)
    return paddle_decoder(c) + paddle_head(c)


def paddle_decoder(c: DecoderConfig, experts: Experts | None = None) -> list[Entry]:
    """Embedding, layers and last norm. experts: the names of a sparse layer's MLP."""
    out = [verbatim("embed.weight", "ernie.embed_tokens.weight"), verbatim("norm.weight", "ernie.norm.weight")]
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.", f"ernie.layers.{i}."
        out += paddle_attention(c, ours, theirs)
        if c.sparse(i):
            assert experts is not None
            out += experts(c, ours + "mlp.", theirs + "mlp.")
        else:
            out += paddle_mlp(ours + "mlp.", theirs + "mlp.", c.mlp_bias)
    return out


def paddle_attention(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    """A layer's norms and attention."""
    out = [
        verbatim(ours + "attn_norm.weight", theirs + "input_layernorm.weight"),
        verbatim(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight"),
        _paddle_qkv(c, ours + "attn.qkv.weight", theirs + "self_attn.qkv_proj.weight"),
        transposed(ours + "attn.out.weight", theirs + "self_attn.o_proj.weight"),
    ]
    if c.attention_bias:
        out += [
            _paddle_qkv(c, ours + "attn.qkv.bias", theirs + "self_attn.qkv_proj.bias"),
            verbatim(ours + "attn.out.bias", theirs + "self_attn.o_proj.bias"),
        ]
    return out


def paddle_mlp(ours: str, theirs: str, bias: bool) -> list[Entry]:
    """The gate half comes before the up half, despite the name."""
    out = [
        transposed(ours + "gate_up.weight", theirs + "up_gate_proj.weight"),
        transposed(ours + "down.weight", theirs + "down_proj.weight"),
    ]
    if bias:
        out += [
            verbatim(ours + "gate_up.bias", theirs + "up_gate_proj.bias"),
            verbatim(ours + "down.bias", theirs + "down_proj.bias"),
        ]
    return out


def paddle_head(c: DecoderConfig) -> list[Entry]:
    if c.tie_word_embeddings:
        # ERNIEKit writes the tied head out a second time, [V, H].
        out = [rows("embed.weight", ("lm_head.weight",), copy_of="ernie.embed_tokens.weight")]
    else:
        out = [transposed("head.weight", "lm_head.weight")]
    if c.head_bias:
        out.append(verbatim("head_bias" if c.tie_word_embeddings else "head.bias", "lm_head.bias"))
    return out


SPEC = ModelSpec(
    name="ernie4_5",
    read_config=read_config,
    write_config=write_config,
    build=Decoder,
    plan=PLAN,
    names=names,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    paddle_prefix="ernie.",
)
