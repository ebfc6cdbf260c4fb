"""Grouped-query self-attention with rotary positions, single device. Used by models/layers/decoder.py.

B batch, L length, H hidden, N heads, D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from erniekit.kernels.attention import attention
from erniekit.kernels.rope import ROTATIONS
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.linear import FusedLinear


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor | None
    max_doc: int | None
    shared: Any = None  # data.types.SharedKeys, where queries and keys are different lists
    real: torch.Tensor | None = None  # bool [B, L], False on padding
    # What layers tell of this micro-batch beside their output; computing a layer again writes the same once more.
    record: dict[tuple[str, int], Any] | None = None


class InnerAttention(nn.Module):
    """The part without weights, held as a collaborator: recompute and context parallel wrap or swap just this."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "auto"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Context) -> torch.Tensor:
        return attention(q, k, v, ctx.cu_seqlens, ctx.max_doc, self.backend, ctx.shared)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        D = config.head_dim
        q, kv = config.num_heads * D, config.num_kv_heads * D
        self.head_dim = D
        self.rotate = ROTATIONS[config.rope_style]
        self.qkv = FusedLinear(
            config.hidden_size, (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), config.attention_bias
        )
        self.out = nn.Linear(q, config.hidden_size, bias=config.attention_bias)
        self.inner = InnerAttention()

    def forward(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        fused = self.qkv(x_BLH)
        B, L, _ = fused.shape  # under sequence parallelism x is a slice of L
        sizes = [rows for _, rows in self.qkv.parts]
        q, k, v = (
            t.reshape(B, L, rows // self.head_dim, self.head_dim) for t, rows in zip(fused.split(sizes, dim=-1), sizes)
        )
        q, k = self.rotate(q, ctx.cos, ctx.sin), self.rotate(k, ctx.cos, ctx.sin)
        return self.out(self.inner(q, k, v, ctx).reshape(B, L, sizes[0]))
