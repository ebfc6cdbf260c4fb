"""Packs of preference pairs -> Batch: labels of both answers in one row, and which keys the rejected part sees.

A BatchLoader for stage DPO is given `collate_pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from erniekit.data.preference import PairSample
from erniekit.data.types import IGNORE, Batch, Pack, Pairs, SharedKeys


def collate_pairs(packs: Sequence[Pack], *, pad_id: int = 0, pad_multiple: int = 8, pad_to: int | None = None) -> Batch:
    """As `collate`. A pair is two segments of cu_seqlens: prompt and chosen part, then the rejected part, whose keys
    are the shared places of the first and itself. A pair without a label (the loader's filler) is not counted."""
    used = [sum(len(sample.ids) for sample in pack.samples) for pack in packs]
    length = pad_to if pad_to is not None else -(-max(used) // pad_multiple) * pad_multiple
    if max(used) > length:
        raise ValueError(f"a pack of {max(used)} tokens does not fit a row of {length}")
    shape = (len(packs), length)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    segment = np.full(shape, -1, dtype=np.int64)
    keys: list[np.ndarray] = []  # of each segment, row after row
    queries: list[int] = []  # how many each segment has
    deltas: list[float] = []
    known: list[float] = []  # the reference's view of the pairs, where it is kept
    squares = 0

    def add(first: int, count: int, before: np.ndarray) -> None:
        queries.append(count)
        keys.append(np.concatenate([before, np.arange(first, first + count)]))

    none = np.zeros(0, dtype=np.int64)
    for row, pack in enumerate(packs):
        at = 0
        for sample in pack.samples:
            assert isinstance(sample, PairSample)
            count, begin = len(sample.ids), row * length + at
            rest = count - sample.rejected
            here = slice(at, at + count)
            ids[row, here], labels[row, here] = sample.ids, sample.labels
            positions[row, at : at + sample.rejected] = np.arange(sample.rejected)
            positions[row, at + sample.rejected : at + count] = np.arange(sample.shared, sample.shared + rest)
            add(begin, sample.rejected, none)
            add(begin + sample.rejected, rest, np.arange(begin, begin + sample.shared))
            squares += sample.rejected**2 + (sample.shared + rest) ** 2 - sample.shared**2
            scored = sample.labels != IGNORE
            if scored.any():
                side = 2 * len(deltas) + (np.arange(count) >= sample.scored)
                segment[row, here] = np.where(scored, side, -1)
                deltas.append(sample.score_delta)
                known += sample.reference or ()
            at += count
        if at < length:  # what is left of a row is a segment of its own
            positions[row, at:] = np.arange(length - at)
            add(row * length + at, length - at, none)
    padded = min(used) < length
    return Batch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(_bounds(queries)),
        max_doc=max(queries),
        num_label_tokens=int((labels != IGNORE).sum()),
        num_tokens=sum(used),
        pack_indices=tuple(pack.index for pack in packs),
        sum_squares=squares,
        real=torch.from_numpy(np.arange(length)[None] < np.array(used)[:, None]) if padded else None,
        shared=SharedKeys(
            torch.from_numpy(np.concatenate(keys)), torch.from_numpy(_bounds(list(map(len, keys)))), max(map(len, keys))
        ),
        pairs=Pairs(
            torch.from_numpy(segment),
            len(deltas),
            torch.tensor(deltas, dtype=torch.float32),
            torch.tensor(known, dtype=torch.float32) if deltas and len(known) == 2 * len(deltas) else None,
        ),
    )


def _bounds(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
