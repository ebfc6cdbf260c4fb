"""Grouped-query self-attention with rotary positions, single device. Used by models/layers/decoder.py.

B batch, L length, H hidden, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from erniekit.kernels.attention import attention
from erniekit.kernels.flash4 import row_attention
from erniekit.kernels.packed_attention import Packs, packed_attention
from erniekit.kernels.rope import ROTATIONS
from erniekit.kernels.rope_qkv import turned
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.linear import FusedLinear, Linear


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor | None
    max_doc: int | None
    shared: Any = None  # data.types.SharedKeys, where queries and keys are different lists
    real: torch.Tensor | None = None  # bool [B, L], False on padding
    # What a layer records of this micro-batch besides its output; None: it is not read.
    record: dict[Any, Any] | None = None
    kernel: str | None = None  # which back end of kernels/packed_attention.py, where kernels for a card fit
    packs: Packs | None = None  # the documents once more, as it takes them
    modality: torch.Tensor | None = None  # uint8 [B, L], where some tokens are not text; None: all are
    # How many tokens are text and how many are not, where the host has it: lengths of tensors that are not read. A
    # number would be part of a compiled layer's program, and every batch would make its own.
    lengths: tuple[torch.Tensor, torch.Tensor] | None = None
    members: torch.Tensor | None = None  # bool [data rows, L]: which tokens of a joined row belong to which data row


class InnerAttention(nn.Module):
    """The part without weights, held as a collaborator: recompute wraps just this, a server swaps it."""

    with_positions = True  # may take the fused projection as it is, where kernels for it fit
    # The keys or values that queries look at, from those of this rank's tokens; None: these are all. Where there are
    # more, a batch lists which of them each document sees (Context.shared).
    all_keys: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.backend = "auto"

    def takes(self, dtype: torch.dtype, ctx: Context) -> bool:
        """Whether kernels for a card do all of it."""
        fits = dtype in (torch.bfloat16, torch.float16) and ctx.cos.shape[-1] in (32, 64)
        return ctx.kernel is not None and fits and self.with_positions and self.backend == "auto"

    def together(self, qkv: torch.Tensor, heads: int, kv_heads: int, halves: bool, ctx: Context) -> torch.Tensor | None:
        """[B, L, C] -> [B, L, Nq * D] by kernels for a card; None: not here, take the parts one after the other."""
        if ctx.kernel is None or not self.takes(qkv.dtype, ctx):
            return None
        q, k, v = turned(qkv, ctx.cos, ctx.sin, heads, kv_heads, halves)
        if self.all_keys is not None:
            k, v = self.all_keys(k), self.all_keys(v)
        if ctx.packs is None:
            by_flash4 = ctx.kernel == "flash4" and q.dtype == torch.bfloat16
            return (row_attention if by_flash4 else attention)(q, k, v).flatten(2)
        return packed_attention(q, k, v, ctx.packs, ctx.kernel)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Context) -> torch.Tensor:
        if self.all_keys is not None:
            k, v = self.all_keys(k), self.all_keys(v)
        return attention(q, k, v, ctx.cu_seqlens, ctx.max_doc, self.backend, ctx.shared)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        D = config.head_dim
        q, kv = config.num_heads * D, config.num_kv_heads * D
        self.head_dim = D
        self.rotate, self.halves = ROTATIONS[config.rope_style], config.rope_style == "halves"
        self.qkv = FusedLinear(
            config.hidden_size, (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), config.attention_bias
        )
        self.out = Linear(q, config.hidden_size, bias=config.attention_bias)
        self.inner = InnerAttention()

    def forward(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        fused = self.qkv(x_BLH)
        B, L, _ = fused.shape  # under sequence parallelism x is a slice of L
        sizes = [rows for _, rows in self.qkv.parts]
        result: torch.Tensor
        if isinstance(self.inner, InnerAttention):
            heads, kv_heads = (rows // self.head_dim for rows in sizes[:2])
            done = self.inner.together(fused, heads, kv_heads, self.halves, ctx)
            if done is not None:
                result = self.out(done)
                return result
        q, k, v = (
            t.reshape(B, L, rows // self.head_dim, self.head_dim) for t, rows in zip(fused.split(sizes, dim=-1), sizes)
        )
        q, k = self.rotate(q, ctx.cos, ctx.sin), self.rotate(k, ctx.cos, ctx.sin)
        result = self.out(self.inner(q, k, v, ctx).reshape(B, L, sizes[0]))
        return result


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import InnerPart

    def _inner(part: InnerAttention) -> InnerPart:
        return part
