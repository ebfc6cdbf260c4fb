"""LLaMA: config, assembly and weight names (PaddleNLP's fused layouts too). Registered in models/__init__.py."""

from __future__ import annotations

from typing import Any

from erniekit.models.config import DecoderConfig, hf_dtype, hf_rope
from erniekit.models.fields import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH, Fields
from erniekit.models.layers.decoder import PLAN, Decoder
from erniekit.models.names import Entry, grouped_qkv, hf_decoder_names, transposed, verbatim
from erniekit.models.spec import ModelSpec


def read_config(raw: dict[str, Any], layout: str, has_head: bool, where: str) -> DecoderConfig:
    f = Fields(raw, where)
    heads, kv_heads, head_dim = f.heads(None)
    theta, scaling = f.rope(10000.0)
    f.only("hidden_act", "silu", "swish")
    for key in ("fuse_attention_qkv", "fuse_attention_ffn"):
        f.flag(key, False)
    return DecoderConfig(
        family="llama",
        vocab_size=f.need("vocab_size", MAX_VOCABULARY),
        hidden_size=f.need("hidden_size", MAX_WIDTH),
        intermediate_size=f.need("intermediate_size"),
        num_layers=f.need("num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=f.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        rope_theta=theta,
        rope_style="halves",
        tie_word_embeddings=f.flag("tie_word_embeddings", False),
        max_positions=f.size("max_position_embeddings", 2048, 1, MAX_POSITIONS),
        attention_bias=f.flag("attention_bias", False),
        mlp_bias=f.flag("mlp_bias", False),
        init_std=f.number("initializer_range", 0.02, 0.0, 100.0),
        rope_scaling=scaling,
        bos_id=f.token("bos_token_id", 1),
        eos_id=f.token("eos_token_id", 2),
        pad_id=f.token("pad_token_id", None),
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
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "max_position_embeddings": c.max_positions,
        "initializer_range": c.init_std,
        "bos_token_id": c.bos_id,
        "pad_token_id": c.pad_id,
    }
    # The fusion flags travel with an HF copy, so that writing it back to Paddle gives the very same tensors.
    travelling = ("eos_token_id", "fuse_attention_qkv", "fuse_attention_ffn")
    kept = c.raw if c.raw_layout == layout else {k: c.raw[k] for k in travelling if k in c.raw}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if layout == "paddle":
        fused = {"fuse_attention_qkv": _fused(c, "qkv"), "fuse_attention_ffn": _fused(c, "ffn")}
        return {**kept, **kind, **shape, **fused, **_paddle_extras(c), "dtype": dtype}
    hf = {
        "hidden_act": "silu",
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "head_dim": c.head_dim,
    }
    return {**kept, **kind, **shape, **hf, **hf_rope(c), **hf_dtype(dtype)}


def _paddle_extras(c: DecoderConfig) -> dict[str, Any]:
    """What PaddleNLP's class takes for granted is written only where this model differs from it."""
    out: dict[str, Any] = {"rope_theta": c.rope_theta}
    if c.head_dim * c.num_heads != c.hidden_size:
        out["head_dim"] = c.head_dim
    if c.rope_scaling:
        out["rope_scaling"] = c.rope_scaling
    if c.attention_bias or c.mlp_bias:
        out.update(attention_bias=c.attention_bias, mlp_bias=c.mlp_bias)
    return out


def _fused(c: DecoderConfig, what: str) -> bool:
    """PaddleNLP fuses by two flags of its own; a model that came from elsewhere is written plain."""
    return bool(c.raw.get(f"fuse_attention_{what}", False))


def _paddle_qkv(c: DecoderConfig, ours: str, attn: str, kind: str) -> Entry:
    if _fused(c, "qkv"):
        return grouped_qkv(ours, f"{attn}qkv_proj.{kind}", c.num_heads, c.num_kv_heads, c.head_dim)
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return transposed(ours, tuple(f"{attn}{p}_proj.{kind}" for p in "qkv"), (q, kv, kv))


def _paddle_gate_up(c: DecoderConfig, ours: str, mlp: str, kind: str) -> Entry:
    if _fused(c, "ffn"):
        return transposed(ours, f"{mlp}gate_up_fused_proj.{kind}")
    return transposed(ours, (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}"), (c.intermediate_size,) * 2)


def names(c: DecoderConfig, layout: str) -> list[Entry]:
    if layout == "hf":
        return hf_decoder_names(c)
    out = [
        verbatim("embed.weight", "llama.embed_tokens.weight"),
        verbatim("norm.weight", "llama.norm.weight"),
    ]
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.", f"llama.layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        out += [
            verbatim(ours + "attn_norm.weight", theirs + "input_layernorm.weight"),
            verbatim(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight"),
        ]
        for kind, in_attention, in_mlp in (("weight", True, True), ("bias", c.attention_bias, c.mlp_bias)):
            if in_attention:
                out += [
                    _paddle_qkv(c, f"{ours}attn.qkv.{kind}", attn, kind),
                    transposed(f"{ours}attn.out.{kind}", f"{attn}o_proj.{kind}"),
                ]
            if in_mlp:
                out += [
                    _paddle_gate_up(c, f"{ours}mlp.gate_up.{kind}", mlp, kind),
                    transposed(f"{ours}mlp.down.{kind}", f"{mlp}down_proj.{kind}"),
                ]
    if not c.tie_word_embeddings:
        out.append(transposed("head.weight", "lm_head.weight"))
    return out


SPEC = ModelSpec(
    name="llama",
    read_config=read_config,
    write_config=write_config,
    build=Decoder,
    plan=PLAN,
    names=names,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    paddle_prefix="llama.",
)
