"""Multi-token prediction: layers behind the trunk, each guessing one token further from the hidden state before it.

Held by models/layers/decoder.py, which lends embedding, final norm and head. B batch, L length, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from erniekit.models.config import DecoderConfig
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.norm import RMSNorm


class NextToken(nn.Module):
    """One depth: z = proj [norm(embedding of the token ahead); norm(hidden)], then a dense decoder layer."""

    def __init__(self, config: DecoderConfig, block: nn.Module) -> None:
        super().__init__()
        H = config.hidden_size
        self.emb_norm, self.hidden_norm = RMSNorm(H, config.rms_norm_eps), RMSNorm(H, config.rms_norm_eps)
        self.proj = Linear(2 * H, H, bias=False)
        self.block = block

    def forward(self, ahead_BLH: torch.Tensor, hidden_BLH: torch.Tensor, ctx: object) -> torch.Tensor:
        joined = torch.cat((self.emb_norm(ahead_BLH), self.hidden_norm(hidden_BLH)), dim=-1)
        result: torch.Tensor = self.block(self.proj(joined), ctx)
        return result
