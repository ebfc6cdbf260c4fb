"""The weight-name map: each tensor of ours <-> the tensors another world stores it in, both directions, exactly.

Model files declare entries with the small vocabulary below; checkpoint/ streams weights through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from erniekit.models.config import DecoderConfig

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Rows [start, start + count) of one of their tensors, transposed first if the entry is."""

    source: int  # which of `theirs`
    start: int = 0
    count: int | None = None  # None: all of its rows


@dataclass(frozen=True)
class Entry:
    """`read(theirs) -> ours` and `write(ours) -> theirs` are exact inverses: rearrangement only, never arithmetic.

    With `runs`, our rows are theirs end to end, so that a rank can read only its own part (checkpoint/slices.py).
    """

    ours: str
    theirs: tuple[str, ...]
    read: Callable[[Tensors], torch.Tensor]
    write: Callable[[torch.Tensor], list[torch.Tensor]]
    copy_of: str = ""  # theirs[0] is a redundant copy of this tensor: written, not read
    runs: tuple[Run, ...] = ()
    turned: bool = False  # theirs are [in, out], ours [out, in]; a bias is the same either way
    shape: tuple[int, ...] = ()  # of their one tensor, when it holds our elements in our order under another shape


def of_runs(
    ours: str, theirs: tuple[str, ...], runs: tuple[Run, ...], turned: bool = False, copy_of: str = ""
) -> Entry:
    """The entry these runs describe; both directions follow from them. Together they hold each of theirs once."""

    def upright(t: torch.Tensor) -> torch.Tensor:
        return t.t() if turned else t

    def read(ts: Tensors) -> torch.Tensor:
        parts = [_rows(upright(ts[run.source]), run) for run in runs]
        return _joined(parts)

    def write(t: torch.Tensor) -> list[torch.Tensor]:
        pieces = (t,) if len(runs) == 1 else t.split([run.count or 0 for run in runs])
        placed = sorted(zip(runs, pieces), key=lambda item: (item[0].source, item[0].start))
        by_source = [[part for run, part in placed if run.source == k] for k in range(len(theirs))]
        return [upright(_joined(parts)) for parts in by_source]

    return Entry(ours, theirs, read, write, copy_of, runs, turned)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One below the other. Without memory there is nothing to copy, and torch.cat would import torch's compiler."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:
        rows = sum(part.shape[0] for part in parts)
        return torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device="meta")
    return torch.cat(parts)


def _rows(t: torch.Tensor, run: Run) -> torch.Tensor:
    return t if run.count is None else t[run.start : run.start + run.count]


def verbatim(ours: str, theirs: str) -> Entry:
    return of_runs(ours, (theirs,), (Run(0),))


def reshaped(ours: str, theirs: str, mine: tuple[int, ...], shape: tuple[int, ...]) -> Entry:
    """The same elements in the same order; only the shape differs."""
    return Entry(
        ours,
        (theirs,),
        lambda ts: ts[0].reshape(mine),
        lambda t: [t.reshape(shape)],
        runs=(Run(0, 0, mine[0]),),
        shape=shape,
    )


def rows(ours: str, theirs: tuple[str, ...], sizes: tuple[int, ...] = (), copy_of: str = "") -> Entry:
    """Ours is theirs stacked along rows (dim 0); torch layout on both sides."""
    return of_runs(ours, theirs, _stacked(theirs, sizes), copy_of=copy_of)


def transposed(ours: str, theirs: str | tuple[str, ...], sizes: tuple[int, ...] = ()) -> Entry:
    """Paddle stores linears [in, out]. One fused tensor, or one tensor for each of our row blocks."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return of_runs(ours, names, _stacked(names, sizes), turned=True)


def _stacked(theirs: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Run, ...]:
    """Each of theirs whole, one below the other."""
    return (Run(0),) if len(theirs) == 1 else _whole(sizes)


@lru_cache(maxsize=64)  # the layers of a model have the same sizes, of hundreds of experts each
def _whole(sizes: tuple[int, ...]) -> tuple[Run, ...]:
    return tuple(Run(k, 0, size) for k, size in enumerate(sizes))


def grouped_qkv(ours: str, theirs: str, heads: int, kv_heads: int, head_dim: int) -> Entry:
    """PaddleNLP's fused qkv, [in, out] with columns per kv head: its query heads, its key, its value. Biases too."""
    group = heads // kv_heads
    stride = (group + 2) * head_dim
    parts = ((0, group * head_dim), (group * head_dim, head_dim), ((group + 1) * head_dim, head_dim))  # q, k, v
    runs = tuple(Run(0, k * stride + start, count) for start, count in parts for k in range(kv_heads))
    return of_runs(ours, (theirs,), runs, turned=True)


def hf_decoder_names(c: DecoderConfig) -> list[Entry]:
    """The layout transformers' ERNIE-4.5 and LLaMA classes share (and PaddleFormers >= 0.3 writes)."""
    out = [
        verbatim("embed.weight", "model.embed_tokens.weight"),
        verbatim("norm.weight", "model.norm.weight"),
    ]
    for i in range(c.num_layers):
        out += hf_attention(c, f"layers.{i}.", f"model.layers.{i}.")
        if not c.sparse(i):
            out += hf_mlp(f"layers.{i}.mlp.", f"model.layers.{i}.mlp.", c.intermediate_size, c.mlp_bias)
    return out + hf_head(c)


def hf_attention(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    """A layer's norms and attention."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out = [
        verbatim(ours + "attn_norm.weight", theirs + "input_layernorm.weight"),
        verbatim(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight"),
    ]
    for kind in ("weight", "bias") if c.attention_bias else ("weight",):
        qkv = tuple(f"{theirs}self_attn.{p}_proj.{kind}" for p in "qkv")
        out.append(rows(f"{ours}attn.qkv.{kind}", qkv, (q, kv, kv)))
        out.append(verbatim(f"{ours}attn.out.{kind}", f"{theirs}self_attn.o_proj.{kind}"))
    return out


def hf_mlp(ours: str, theirs: str, width: int, bias: bool) -> list[Entry]:
    return mlp(ours, (theirs + "gate_proj", theirs + "up_proj", theirs + "down_proj"), width, bias)


def mlp(ours: str, theirs: tuple[str, str, str], width: int, bias: bool) -> list[Entry]:
    """theirs: what gate, up and down are called."""
    gate, up, down = theirs
    out = []
    for kind in ("weight", "bias") if bias else ("weight",):
        out.append(rows(f"{ours}gate_up.{kind}", (f"{gate}.{kind}", f"{up}.{kind}"), (width, width)))
        out.append(verbatim(f"{ours}down.{kind}", f"{down}.{kind}"))
    return out


def hf_head(c: DecoderConfig) -> list[Entry]:
    out = [] if c.tie_word_embeddings else [verbatim("head.weight", "lm_head.weight")]
    if c.head_bias:
        out.append(verbatim("head_bias" if c.tie_word_embeddings else "head.bias", "lm_head.bias"))
    return out
