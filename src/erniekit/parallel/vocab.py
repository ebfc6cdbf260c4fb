"""Embedding, logits and loss over a vocabulary that is dealt out to the tensor-parallel ranks.

tensor.py puts these in the places of the local ones. T tokens, H hidden, v local vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.kernels.cross_entropy import linear_cross_entropy
from erniekit.kernels.head_gradients import Shard
from erniekit.kernels.token_losses import linear_token_losses
from erniekit.parallel import comm
from erniekit.parallel.collectives import copy_to, gather_from, scatter_sum, sum_from
from erniekit.parallel.sharding import Sharding


class VocabEmbedding(nn.Module):
    """In the slot of models.layers.decoder.LocalEmbedding: each rank looks up the ids it has rows of."""

    def __init__(self, sharding: Sharding, name: str, rank: int, group: ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        cut = sharding.cut(f"{name}.weight", rank)
        assert cut is not None
        self.start, self.stop = cut.rows[0]
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        here = (ids >= self.start) & (ids < self.stop)
        rows = F.embedding((ids - self.start).clamp(0, max(0, self.stop - self.start - 1)), weight)
        rows = rows * here[..., None]
        return scatter_sum(rows, 1, self.group) if self.sequence_parallel else sum_from(rows, self.group)


class VocabHead(nn.Module):
    """In the slot of models.layers.head.LocalHead: logits are joined, the loss never needs them joined."""

    def __init__(self, group: ProcessGroup, sizes: list[int], rank: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sizes, self.start = group, sizes, sum(sizes[:rank])
        self.sequence_parallel = sequence_parallel

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, L, H] whose gradient every rank gets summed."""
        if self.sequence_parallel:
            return gather_from(hidden, 1, self.group)
        return copy_to(hidden, self.group)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """All logits on every rank; for probes and generation, so without gradient."""
        with torch.no_grad():
            local = F.linear(self._whole(hidden), weight, bias)
            widest = max(self.sizes)
            padded = F.pad(local, (0, widest - local.shape[-1])).contiguous()
            parts = [torch.empty_like(padded) for _ in self.sizes]
            comm.all_gather(parts, padded, self.group)
            return torch.cat([p[..., :n] for p, n in zip(parts, self.sizes)], dim=-1)

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
        """As LocalHead.loss, alike on every rank."""
        flat = self._whole(hidden).flatten(0, 1)
        return linear_cross_entropy(
            flat, weight, labels.flatten(), bias, ignore, chunk, count, scale, Shard(self.start, self._join)
        )

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
        """hidden [B, L or its slice, H], labels [B, L] -> the loss of each token, fp32 [B, L], alike on every rank."""
        flat = self._whole(hidden).flatten(0, 1)
        shard = Shard(self.start, self._join)
        losses = linear_token_losses(flat, weight, labels.flatten(), bias, ignore, chunk, count, shard)
        return losses.view(labels.shape)

    def _join(self, norms: torch.Tensor, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One small exchange for a chunk of rows."""
        mine = torch.stack((norms, picked))
        parts = [torch.empty_like(mine) for _ in self.sizes]
        comm.all_gather(parts, mine, self.group)
        everyone = torch.stack(parts)
        whole = everyone[:, 0].logsumexp(0)
        return whole, whole - everyone[:, 1].sum(0)
