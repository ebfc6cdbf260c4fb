"""The pre-norm decoder every text model here assembles: embedding, layers, norm, head. Single device; knows no rank.

B batch, L length, H hidden, V vocab.
"""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.cross_entropy import CHUNK
from erniekit.kernels.rope import cos_sin, inverse_frequencies
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.attention import Attention, Context
from erniekit.models.layers.head import LocalHead
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.norm import RMSNorm
from erniekit.parallel.plan import column, heads, heads_in, row, vocab

# How these weights shard; everything not named here is replicated.
PLAN = {
    "embed": vocab(),
    "layers.*.attn.qkv": heads(),
    "layers.*.attn.out": heads_in(),
    "layers.*.mlp.gate_up": column(parts=2),
    "layers.*.mlp.down": row(),
    "head": vocab(),
    "head_bias": vocab(),
}


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
        self.output = LocalHead()
        self.first = self.last = True  # a pipeline stage may be neither

    def head_weight(self) -> torch.Tensor:
        """[V, H]; the embedding itself when tied."""
        return self.embed.weight if self.config.tie_word_embeddings else self.head.weight

    def head_bias_or_none(self) -> torch.Tensor | None:
        if not self.config.head_bias:
            return None
        return self.head_bias if self.config.tie_word_embeddings else self.head.bias

    def context(
        self, positions: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_doc: int | None = None
    ) -> Context:
        """What all layers share for one batch."""
        c = self.config
        freq = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, positions.device)
        return Context(*cos_sin(positions, freq), cu_seqlens, max_doc)

    def run_layers(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        for layer in self.layers:
            x_BLH = layer(x_BLH, ctx)
        return x_BLH

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_doc: int | None = None,
        labels: torch.Tensor | None = None,
        ignore: int = -100,
        chunk: int = CHUNK,
    ) -> torch.Tensor:
        """Token ids [B, L] -> logits [B, L, V], or with labels [B, L] the SUM of their losses (fp32).

        A pipeline stage that lacks the embedding takes hidden states instead; one that lacks the head returns them.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        x_BLH = self.embed(tokens) if self.first else tokens
        x_BLH = self.run_layers(x_BLH, self.context(positions, cu_seqlens, max_doc))
        if not self.last:
            return x_BLH
        h_BLH, weight, bias = self.norm(x_BLH), self.head_weight(), self.head_bias_or_none()
        if labels is None:
            return self.output.logits(h_BLH, weight, bias)
        return self.output.loss(h_BLH, weight, labels, bias, ignore, chunk)
