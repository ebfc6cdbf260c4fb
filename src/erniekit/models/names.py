"""The weight-name map: each tensor of ours <-> the tensors another world stores it in, both directions, exactly.

Model files declare entries with the small vocabulary below; checkpoint/ streams weights through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from erniekit.models.config import DecoderConfig

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """`read(theirs) -> ours` and `write(ours) -> theirs` are exact inverses: rearrangement only, never arithmetic."""

    ours: str
    theirs: tuple[str, ...]
    read: Callable[[Tensors], torch.Tensor]
    write: Callable[[torch.Tensor], list[torch.Tensor]]
    copy_of: str = ""  # theirs[0] is a redundant copy of this tensor: written, not read


def verbatim(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), lambda ts: ts[0], lambda t: [t])


def rows(ours: str, theirs: tuple[str, ...], sizes: tuple[int, ...] = (), copy_of: str = "") -> Entry:
    """Ours is theirs stacked along rows (dim 0); torch layout on both sides."""
    if len(theirs) == 1:
        return Entry(ours, theirs, lambda ts: ts[0], lambda t: [t], copy_of)
    return Entry(ours, theirs, lambda ts: torch.cat(list(ts)), lambda t: list(t.split(sizes)), copy_of)


def transposed(ours: str, theirs: str | tuple[str, ...], sizes: tuple[int, ...] = ()) -> Entry:
    """Paddle stores linears [in, out]. One fused tensor, or one tensor for each of our row blocks."""
    if isinstance(theirs, str):
        return Entry(ours, (theirs,), lambda ts: ts[0].t(), lambda t: [t.t()])
    return Entry(ours, theirs, lambda ts: torch.cat([t.t() for t in ts]), lambda t: [p.t() for p in t.split(sizes)])


def grouped_qkv(ours: str, theirs: str, heads: int, kv_heads: int, head_dim: int) -> Entry:
    """PaddleNLP's fused qkv, [in, out] with columns per kv head: its query heads, its key, its value. Biases too."""
    group = heads // kv_heads

    def read(ts: Tensors) -> torch.Tensor:
        row = ts[0].shape[:-1]  # [in] of a weight, [] of a bias
        q, k, v = ts[0].t().reshape(kv_heads, group + 2, head_dim, *row).split((group, 1, 1), dim=1)
        return torch.cat([part.reshape(-1, *row) for part in (q, k, v)])

    def write(t: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = t.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))
        row = t.shape[1:]
        parts = [p.reshape(kv_heads, -1, head_dim, *row) for p in (q, k, v)]
        return [torch.cat(parts, dim=1).reshape(-1, *row).t()]

    return Entry(ours, (theirs,), read, write)


def hf_decoder_names(c: DecoderConfig) -> list[Entry]:
    """The layout transformers' ERNIE-4.5 and LLaMA classes share (and PaddleFormers >= 0.3 writes)."""
    q, kv, width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    out = [
        verbatim("embed.weight", "model.embed_tokens.weight"),
        verbatim("norm.weight", "model.norm.weight"),
    ]
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        out += [
            verbatim(ours + "attn_norm.weight", theirs + "input_layernorm.weight"),
            verbatim(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight"),
        ]
        kinds = [("weight", True, True), ("bias", c.attention_bias, c.mlp_bias)]
        for kind, in_attention, in_mlp in kinds:
            if in_attention:
                qkv = tuple(f"{attn}{p}_proj.{kind}" for p in "qkv")
                out.append(rows(f"{ours}attn.qkv.{kind}", qkv, (q, kv, kv)))
                out.append(verbatim(f"{ours}attn.out.{kind}", f"{attn}o_proj.{kind}"))
            if in_mlp:
                gate_up = (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}")
                out.append(rows(f"{ours}mlp.gate_up.{kind}", gate_up, (width, width)))
                out.append(verbatim(f"{ours}mlp.down.{kind}", f"{mlp}down_proj.{kind}"))
    if not c.tie_word_embeddings:
        out.append(verbatim("head.weight", "lm_head.weight"))
    if c.head_bias:
        out.append(verbatim("head_bias" if c.tie_word_embeddings else "head.bias", "lm_head.bias"))
    return out
