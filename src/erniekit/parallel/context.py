"""Context parallelism: each rank has a part of every sequence; keys and values are gathered, documents stay apart.

A row is cut in 2 x ranks chunks and rank r has chunks r and 2n-1-r, so that causal work is even. `split` cuts a batch,
`ContextAttention` stands where the inner attention stands. Called by apply.py and engine.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.parallel.collectives import gather_from


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def take(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """This rank's chunks of x [B, L, ...] along L, which is a multiple of 2 * ranks."""
    parts = x.chunk(2 * ranks, dim=1)
    return torch.cat([parts[c] for c in chunks_of(rank, ranks)], dim=1)


def in_order(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The whole sequence from the ranks' parts joined along L."""
    parts = x.chunk(2 * ranks, dim=1)
    where = {c: 2 * r + k for r in range(ranks) for k, c in enumerate(chunks_of(r, ranks))}
    return torch.cat([parts[where[c]] for c in range(2 * ranks)], dim=1)


def split(batch: Any, rank: int, ranks: int) -> Any:
    """A micro-batch with this rank's tokens, labels, positions; the documents' bounds stay those of whole rows."""
    if ranks == 1:
        return batch
    parts = {name: take(getattr(batch, name), rank, ranks) for name in ("input_ids", "labels", "positions")}
    return replace(batch, **parts, packed=True)


class ContextAttention(nn.Module):
    """Local queries against all keys and values, one call a document and chunk: exact for any packing."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        super().__init__()
        self.group, self.rank, self.ranks = group, rank, group.size()
        self.backend = "auto"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Any) -> torch.Tensor:
        k, v = (in_order(gather_from(t, 1, self.group), self.ranks) for t in (k, v))
        B, length = k.shape[:2]
        size = length // (2 * self.ranks)
        bounds = ctx.cu_seqlens.tolist()
        rows = []
        for b in range(B):
            documents = [(s - b * length, e - b * length) for s, e in pairwise(bounds)]
            documents = [(s, e) for s, e in documents if 0 <= s < length]
            pieces = []
            for place, chunk in enumerate(chunks_of(self.rank, self.ranks)):
                first, last = chunk * size, (chunk + 1) * size
                for start, end in documents:
                    lo, hi = max(start, first), min(end, last)
                    if lo < hi:
                        at = place * size - first
                        pieces.append(_tail(q[b, lo + at : hi + at], k[b, start:hi], v[b, start:hi]))
            rows.append(torch.cat(pieces))
        return torch.stack(rows)


def _tail(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) positions of a document whose keys and values are k, v [n, heads, D]."""
    late, n = q.shape[0], k.shape[0]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if late == n:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        seen = torch.ones(late, n, dtype=torch.bool, device=q.device).tril(n - late)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)
