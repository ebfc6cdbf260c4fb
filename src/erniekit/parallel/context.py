"""Context parallelism: each rank has a part of every sequence; keys and values are gathered, documents stay apart.

A row is cut in 2 x ranks chunks and rank r has chunks r and 2n-1-r, so that causal work is even. `split` cuts a batch
and lists the keys that each piece of a document attends to; with `KeysOfAll` before it, the same attention as on one
rank does the rest. Called by apply.py and engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from erniekit.model_contract import Tower
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
    tokens: int  # of all ranks
    copies: int


def split(batch: Any, rank: int, ranks: int, towers: Mapping[str, Tower] | None = None) -> Any:
    """A micro-batch with what belongs to this rank's tokens; cu_seqlens bounds the pieces of documents it has of them,
    and `shared` holds the keys of each piece. towers: the model's, for batches with inputs of theirs."""
    if ranks == 1:
        return batch
    parts = {name: take(getattr(batch, name), rank, ranks) for name in ("input_ids", "labels", "positions")}
    for name in ("real", "modality", "members"):
        if getattr(batch, name) is not None:
            parts[name] = take(getattr(batch, name), rank, ranks)
    if batch.pairs is not None:
        parts["pairs"] = replace(batch.pairs, segment=take(batch.pairs.segment, rank, ranks))
    if batch.noise is not None:
        parts["noise"] = type(batch.noise)(*(take(t, rank, ranks) for t in batch.noise))
    if batch.future is not None:
        parts["future"] = type(batch.future)(*(take(t, rank, ranks) for t in (batch.future.ids, batch.future.labels)))
    found = batch.tower_inputs()
    here = {name: _items_here((towers or {})[name], found[name], batch.input_ids.shape, rank, ranks) for name in found}
    cut = replace(batch.with_tower_inputs(here), **parts, **_pieces(batch, rank, ranks), packed=True)
    return cut.counted()


def _items_here(tower: Tower, inputs: Any, shape: tuple[int, int], rank: int, ranks: int) -> Any:
    """The items that some token of this rank shows, all of each; features of other ranks' tokens have the place
    behind all tokens, which is none."""
    B, length = shape
    size = length // (2 * ranks)
    row, column = inputs.places // length, inputs.places % length
    first, second = chunks_of(rank, ranks)
    chunk, inside = column // size, column % size
    place = torch.where(chunk == first, inside, size + inside) + row * 2 * size
    place = torch.where((chunk == first) | (chunk == second), place, B * 2 * size)
    of_items = place.split(tower.counts(inputs))
    kept = [n for n, part in enumerate(of_items) if bool((part < B * 2 * size).any())]
    places = torch.cat([of_items[n] for n in kept]) if kept else place[:0]
    return tower.select(inputs, kept)._replace(places=places)


def _pieces(batch: Any, rank: int, ranks: int) -> dict[str, Any]:
    B, length = batch.input_ids.shape
    size = length // (2 * ranks)
    ends = batch.cu_seqlens.tolist()
    if batch.shared is None:
        keys, key_ends = torch.arange(B * length), ends
    else:
        keys, key_ends = batch.shared.index.cpu(), batch.shared.bounds.tolist()
    documents = list(zip(pairwise(ends), pairwise(key_ends)))
    lengths, visible = [], []
    for row in range(B):
        for chunk in chunks_of(rank, ranks):
            first = row * length + chunk * size
            for (start, end), (key_start, key_end) in documents:
                low, high = max(start, first), min(end, first + size)
                if low < high:
                    lengths.append(high - low)
                    visible.append(keys[key_start : key_end - (end - high)])
    key_lengths = [len(piece) for piece in visible]
    # Parts come joined: the place of every token among them.
    joined = torch.argsort(torch.cat([take(torch.arange(length)[None], r, ranks)[0] for r in range(ranks)]))
    index = torch.cat(visible)
    index = index - index % length + joined[index % length]
    # A rank has two chunks of a row, and pieces of one document in both.
    copies = 2 * (1 if batch.shared is None else batch.shared.copies)
    shared = GatheredKeys(index, _bounds(key_lengths), max(key_lengths), B * length, copies)
    return dict(cu_seqlens=_bounds(lengths), max_doc=max(lengths), shared=shared)


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class KeysOfAll:
    """Keys or values [B, L, heads, D] of every rank's tokens, joined along L."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from(x, 1, self.group)
