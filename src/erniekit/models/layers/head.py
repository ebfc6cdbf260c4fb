"""From hidden states to logits or to the loss: a collaborator without weights, so that parallel/ can swap it.

Held by models/layers/decoder.py; the weight is handed in, as it may be the embedding itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.cross_entropy import linear_cross_entropy
from erniekit.kernels.token_losses import linear_token_losses


class LocalHead(nn.Module):
    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(hidden, weight, bias)

    def loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        ignore: int,
        chunk: int,
        count: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """hidden [B, L, H], labels [B, L] -> the SUM of token losses, times scale; count: of labels not ignored."""
        return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), bias, ignore, chunk, count, scale)

    def token_losses(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        ignore: int,
        chunk: int,
        count: int | None = None,
    ) -> torch.Tensor:
        """hidden [B, L, H], labels [B, L] -> the loss of each token, fp32 [B, L], 0 where ignored."""
        flat = linear_token_losses(hidden.flatten(0, 1), weight, labels.flatten(), bias, ignore, chunk, count)
        return flat.view(labels.shape)
