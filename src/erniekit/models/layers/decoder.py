"""The pre-norm decoder every text model here assembles: embedding, layers, norm, head. Single device; knows no rank.

B batch, L length, H hidden, V vocab.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.rope import cos_sin, inverse_frequencies
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.attention import Attention, Context
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def attend(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        return x_BLH + self.attn(self.attn_norm(x_BLH), ctx)

    def forward(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        x_BLH = self.attend(x_BLH, ctx)
        return x_BLH + self.mlp(self.mlp_norm(x_BLH))


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        elif config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def head_weight(self) -> torch.Tensor:
        """[V, H]; the embedding itself when tied."""
        return self.embed.weight if self.config.tie_word_embeddings else self.head.weight

    def head_bias_or_none(self) -> torch.Tensor | None:
        if not self.config.head_bias:
            return None
        return self.head_bias if self.config.tie_word_embeddings else self.head.bias

    def hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_doc: int | None = None,
    ) -> torch.Tensor:
        """Normed hidden states [B, L, H]: what the head, or a loss that fuses the head, multiplies."""
        c = self.config
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        freq = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, input_ids.device)
        ctx = Context(*cos_sin(positions, freq), cu_seqlens, max_doc)
        x_BLH = self.embed(input_ids)
        for layer in self.layers:
            x_BLH = layer(x_BLH, ctx)
        return self.norm(x_BLH)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_doc: int | None = None,
    ) -> torch.Tensor:
        """Logits [B, L, V]."""
        h_BLH = self.hidden(input_ids, positions, cu_seqlens, max_doc)
        return F.linear(h_BLH, self.head_weight(), self.head_bias_or_none())
