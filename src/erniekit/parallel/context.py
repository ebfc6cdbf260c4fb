"""Context parallelism: each rank has a part of every sequence; keys and values are gathered, documents stay apart.

A row is cut in 2 x ranks chunks and rank r has chunks r and 2n-1-r, so that causal work is even. `split` cuts a batch
and says which keys each piece of it looks at; `ContextAttention` stands where the inner attention stands. Called by
apply.py and engine.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

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


class GatheredKeys(NamedTuple):
    """As data.types.SharedKeys, for a rank's own queries; index counts in the ranks' parts joined, as they come."""

    index: torch.Tensor  # type: ignore[assignment]  # tuple.index is not used
    bounds: torch.Tensor
    longest: int


def split(batch: Any, rank: int, ranks: int) -> Any:
    """A micro-batch with what belongs to this rank's tokens; cu_seqlens bounds the pieces of documents it has of them,
    and `shared` holds the keys of each piece."""
    if ranks == 1:
        return batch
    parts = {name: take(getattr(batch, name), rank, ranks) for name in ("input_ids", "labels", "positions")}
    for name in ("real", "modality"):
        if getattr(batch, name) is not None:
            parts[name] = take(getattr(batch, name), rank, ranks)
    if batch.vision is not None:
        parts["vision"] = _pictures_here(batch.vision, batch.input_ids.shape, rank, ranks)
    if batch.pairs is not None:
        parts["pairs"] = replace(batch.pairs, segment=take(batch.pairs.segment, rank, ranks))
    if batch.future is not None:
        parts["future"] = type(batch.future)(*(take(t, rank, ranks) for t in (batch.future.ids, batch.future.labels)))
    return replace(batch, **parts, **_pieces(batch, rank, ranks), packed=True).counted()


def _pictures_here(vision: Any, shape: tuple[int, int], rank: int, ranks: int) -> Any:
    """The pictures that some token of this rank shows, all of each; features of other ranks' tokens have the place
    behind all tokens, which is none."""
    B, length = shape
    size = length // (2 * ranks)
    row, column = vision.places // length, vision.places % length
    first, second = chunks_of(rank, ranks)
    chunk, inside = column // size, column % size
    place = torch.where(chunk == first, inside, size + inside) + row * 2 * size
    place = torch.where((chunk == first) | (chunk == second), place, B * 2 * size)
    patches = vision.grids.prod(1).tolist()
    # Four patches make a token, and in a video those of two frames.
    tokens = [count // (4 if t == 1 else 8) for count, t in zip(patches, vision.grids[:, 0].tolist())]
    kept = [bool((part < B * 2 * size).any()) for part in place.split(tokens)]
    taken = [x[torch.tensor(kept, dtype=torch.bool).repeat_interleave(torch.tensor(sizes))]
             for x, sizes in ((vision.patches, patches), (place, tokens))]  # fmt: skip
    return vision._replace(patches=taken[0], grids=vision.grids[torch.tensor(kept)], places=taken[1])


def _pieces(batch: Any, rank: int, ranks: int) -> dict[str, Any]:
    B, length = batch.input_ids.shape
    size = length // (2 * ranks)
    ends = batch.cu_seqlens.tolist()
    if batch.shared is None:
        keys, key_ends = torch.arange(B * length), ends
    else:
        keys, key_ends = batch.shared.index.cpu(), batch.shared.bounds.tolist()
    documents = list(zip(pairwise(ends), pairwise(key_ends)))
    lengths, seen = [], []
    for row in range(B):
        for chunk in chunks_of(rank, ranks):
            first = row * length + chunk * size
            for (start, end), (key_start, key_end) in documents:
                low, high = max(start, first), min(end, first + size)
                if low < high:
                    lengths.append(high - low)
                    seen.append(keys[key_start : key_end - (end - high)])
    key_lengths = [len(piece) for piece in seen]
    # Parts come joined: the place of every token among them.
    joined = torch.argsort(torch.cat([take(torch.arange(length)[None], r, ranks)[0] for r in range(ranks)]))
    index = torch.cat(seen)
    index = index - index % length + joined[index % length]
    shared = GatheredKeys(index, _bounds(key_lengths), max(key_lengths))
    return dict(cu_seqlens=_bounds(lengths), max_doc=max(lengths), shared=shared)


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class ContextAttention(nn.Module):
    """Local queries against all keys and values, one call a piece of a document: exact for any packing."""

    waits_for_host = True

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        super().__init__()
        self.group, self.rank = group, rank
        self.backend = "auto"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Any) -> torch.Tensor:
        shared = ctx.shared
        assert shared is not None, "a batch that split() has cut says which keys its tokens look at"
        k, v = (gather_from(t, 1, self.group).flatten(0, 1)[shared.index] for t in (k, v))
        queries = q.flatten(0, 1).split(ctx.cu_seqlens.diff().tolist())
        lengths = shared.bounds.diff().tolist()
        pieces = [_tail(a, b, c) for a, b, c in zip(queries, k.split(lengths), v.split(lengths))]
        return torch.cat(pieces).view_as(q)


def _tail(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) places of k, v [n, heads, D]."""
    n, m = q.shape[0], k.shape[0]
    if q.device.type == "cpu":  # the mask that torch's own would make there
        ends_aligned = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    else:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: seconds

        ends_aligned = causal_lower_right(n, m)  # on a card this makes no mask
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ends_aligned, enable_gqa=True)[0].transpose(0, 1)
