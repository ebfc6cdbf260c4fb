"""The GGUF names of our tensors, in the shapes llama.cpp reads: one more layout besides those of models/.

Called by run.py. Facts from llama.cpp's model files: ERNIE rotates neighbouring channels there as it does here; for
LLaMA, whose channels pair up across halves, the rows of queries and keys are interleaved instead.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from erniekit.kernels.rope import inverse_frequencies
from erniekit.models.config import DecoderConfig
from erniekit.models.names import Entry, Tensors, mlp, rows, verbatim


def stored_config(c: DecoderConfig) -> DecoderConfig:
    """The part of a model that a GGUF file holds: no layers that predict further tokens, no bias that nothing reads."""
    moe = c.moe and replace(c.moe, bias=c.moe.bias and c.moe.biased)
    return replace(c, mtp_layers=0, moe=moe)


def gguf_names(c: DecoderConfig) -> list[Entry]:
    """Of a stored_config."""
    out = [verbatim("embed.weight", "token_embd.weight")]
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.", f"blk.{i}."
        out += [
            verbatim(ours + "attn_norm.weight", theirs + "attn_norm.weight"),
            verbatim(ours + "mlp_norm.weight", theirs + "ffn_norm.weight"),
        ]
        for kind in ("weight", "bias") if c.attention_bias else ("weight",):
            out += [_qkv(c, ours, theirs, kind), verbatim(f"{ours}attn.out.{kind}", f"{theirs}attn_output.{kind}")]
        if c.sparse(i):
            out += _experts(c, ours + "mlp.", theirs)
        else:
            out += _mlp(ours + "mlp.", theirs, "", c.intermediate_size, c.mlp_bias)
    out.append(verbatim("norm.weight", "output_norm.weight"))
    return out if c.tie_word_embeddings else [*out, verbatim("head.weight", "output.weight")]


def further_tensors(c: DecoderConfig) -> dict[str, torch.Tensor]:
    """What is no weight here and a tensor there: how much llama3's scaling slows each pair of channels down."""
    if not c.rope_scaling or c.rope_scaling["rope_type"] != "llama3":
        return {}
    device = torch.device("cpu")
    plain = inverse_frequencies(c.head_dim, c.rope_theta, None, device)
    return {"rope_freqs.weight": plain / inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, device)}


def _qkv(c: DecoderConfig, ours: str, theirs: str, kind: str) -> Entry:
    D = c.head_dim
    sizes = (c.num_heads * D, c.num_kv_heads * D, c.num_kv_heads * D)
    names = tuple(f"{theirs}attn_{part}.{kind}" for part in "qkv")
    if c.rope_style == "pairs":
        return rows(f"{ours}attn.qkv.{kind}", names, sizes)

    def read(ts: Tensors) -> torch.Tensor:
        return torch.cat([_rearranged(ts[0], (-1, D // 2, 2)), _rearranged(ts[1], (-1, D // 2, 2)), ts[2]])

    def write(t: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = t.split(sizes)
        return [_rearranged(q, (-1, 2, D // 2)), _rearranged(k, (-1, 2, D // 2)), v]

    return Entry(f"{ours}attn.qkv.{kind}", names, read, write)


def _rearranged(t: torch.Tensor, within: tuple[int, int, int]) -> torch.Tensor:
    """Rows seen as [head, a, b] and written as [head, b, a]."""
    return t.reshape(*within, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def _mlp(ours: str, theirs: str, suffix: str, width: int, bias: bool = False) -> list[Entry]:
    gate, up, down = (f"{theirs}ffn_{name}{suffix}" for name in ("gate", "up", "down"))
    return mlp(ours, (gate, up, down), width, bias)


def _experts(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    m = c.moe
    assert m is not None
    E, H, M = m.experts, c.hidden_size, m.width
    out = [verbatim(ours + "router.weight", theirs + "ffn_gate_inp.weight")]
    if m.bias:
        out.append(verbatim(ours + "router.bias", theirs + "exp_probs_b.bias"))
    out += [
        Entry(
            ours + "experts.gate_up.weight",
            (theirs + "ffn_gate_exps.weight", theirs + "ffn_up_exps.weight"),
            lambda ts: torch.stack(tuple(ts), 1).reshape(E * 2 * M, H),
            lambda t: list(t.reshape(E, 2, M, H).unbind(1)),
        ),
        Entry(
            ours + "experts.down.weight",
            (theirs + "ffn_down_exps.weight",),
            lambda ts: ts[0].reshape(E * H, M),
            lambda t: [t.reshape(E, H, M)],
        ),
    ]
    return out + (_mlp(ours + "shared.", theirs, "_shexp", m.shared_width) if m.shared_width else [])
