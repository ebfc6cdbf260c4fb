"""Packs -> Batch: rows of equal length, positions that restart per document, and the bounds of attention.

The loader's threads call `collate`; the trainer moves the result to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from erniekit.data.buckets import fit
from erniekit.data.types import IGNORE, Batch, Future, Pack


def collate(
    packs: Sequence[Pack],
    *,
    pad_id: int = 0,
    pad_multiple: int = 8,
    pad_to: int | None = None,
    ahead: int = 0,
    one_count: bool = False,
) -> Batch:
    """Rows are as long as the longest pack, rounded up to `pad_multiple`, or exactly `pad_to`.

    ahead: how many further tokens are predicted. one_count: positions run through a row, as ERNIEKit's do; between
    documents the masks do not show, but its padding attends to all of them.
    """
    used = [sum(len(sample.ids) for sample in pack.samples) for pack in packs]
    length = pad_to if pad_to is not None else -(-max(used) // pad_multiple) * pad_multiple
    if max(used) > length:
        raise ValueError(f"a pack of {max(used)} tokens does not fit a row of {length}")
    shape = (len(packs), length)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    documents: list[int] = []  # lengths, row after row; what is left of a row is a document of its own
    for row, pack in enumerate(packs):
        at = 0
        for sample in pack.samples:
            end = at + len(sample.ids)
            ids[row, at:end], labels[row, at:end] = sample.ids, sample.labels
            documents.append(end - at)
            at = end
        if at < length:
            documents.append(length - at)
    bounds = np.concatenate([[0], np.cumsum(documents)])
    padded = min(used) < length
    real = torch.from_numpy(np.arange(length)[None] < np.array(used)[:, None]) if padded else None
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], documents)
    if one_count:
        positions = np.tile(np.arange(length), len(packs))
    batch = Batch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions.reshape(shape)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_doc=max(documents),
        num_label_tokens=int((labels != IGNORE).sum()),
        num_tokens=sum(used),
        pack_indices=tuple(pack.index for pack in packs),
        packed=any(len(pack.samples) > 1 for pack in packs),
        sum_squares=sum(len(sample.ids) ** 2 for pack in packs for sample in pack.samples),
        real=real,
    )
    return with_future(batch, ahead) if ahead else batch


def collate_joined(
    packs: Sequence[Pack], *, lengths: Sequence[int], collate: Callable[..., Batch] = collate, pad_id: int = 0
) -> Batch:
    """All packs end to end in one row, padded to the shortest of `lengths` that holds them: the same documents with the
    same positions and labels as in rows of their own, in one of a few shapes. collate: for one row of known length;
    preference_collate.py has another."""
    joined = Pack(tuple(sample for pack in packs for sample in pack.samples), packs[0].index)
    used = [sum(len(sample.ids) for sample in pack.samples) for pack in packs]
    batch = collate([joined], pad_id=pad_id, pad_to=fit(sum(used), lengths))
    if batch.real is None:  # a row that happens to be full is no other kind of row for what is compiled
        batch = replace(batch, real=torch.ones_like(batch.input_ids, dtype=torch.bool))
    if len(packs) == 1:
        return batch
    ends = np.cumsum(used)
    place = np.arange(batch.input_ids.shape[1])
    members = (place >= (ends - used)[:, None]) & (place < ends[:, None])
    return replace(
        batch, pack_indices=tuple(pack.index for pack in packs), members=torch.from_numpy(members), packed=True
    )


def with_future(batch: Batch, ahead: int) -> Batch:
    """The 1st, 2nd ... next token of every position and what follows it. Trained only where the position itself and
    the one it looks ahead to both are, and never across the end of a document."""
    ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
    place = torch.arange(len(ids))
    document = torch.searchsorted(batch.cu_seqlens.long(), place, right=True)
    next_ids, next_labels = [], []
    for distance in range(1, ahead + 1):
        there = (place + distance).clamp(max=len(ids) - 1)
        inside = (place + distance < len(ids)) & (document[there] == document)
        trained = inside & (labels != IGNORE)
        next_ids.append(torch.where(inside, ids[there], 0))
        next_labels.append(torch.where(trained, labels[there], IGNORE))
    shape = (*batch.input_ids.shape, ahead)
    future = Future(torch.stack(next_ids, -1).view(shape), torch.stack(next_labels, -1).view(shape))
    return replace(batch, future=future).counted()


def one_document(ids: torch.Tensor, length: int) -> Batch:
    """Token ids [1, n] as a batch of one untrained row of `length`: padding comes after, so it changes nothing."""
    padded = torch.nn.functional.pad(ids, (0, length - ids.shape[1]))
    return Batch(
        input_ids=padded,
        labels=torch.full_like(padded, IGNORE),
        positions=torch.arange(length)[None],
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        max_doc=length,
        num_label_tokens=0,
        num_tokens=ids.shape[1],
        packed=False,
    )
