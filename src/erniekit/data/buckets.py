"""Bucket lengths: the few lengths that rows of every length are padded to, chosen from the lengths there are.

A compiled model has one program for each length it meets, and a CUDA graph holds one. recipes/datasets.py chooses them;
`collate_joined` lays a micro-batch out in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

MOST = 8  # lengths: each is a compilation, and a CUDA graph where there are any
WASTE = 0.04  # padding that may come to each real token, where this number of lengths is enough for it
TILE = 128  # tokens that kernels work on at once; rows of LONG and more are multiples of it
LONG = 1024
ALIGNED = 8
SEEN = 16384  # packs that lengths are taken from


class Lengths(Protocol):
    """What PackStream has: which samples make pack p, and how long they are."""

    lengths: list[np.ndarray]
    epochs: int | None

    def __getitem__(self, number: int, /) -> Sequence[tuple[int, int]]: ...
    def __len__(self) -> int: ...
    def count_packs(self, epochs: float = 1) -> int: ...


def sizes_of(stream: Lengths, rows: int) -> np.ndarray:
    """Tokens of the first micro-batches of this number of packs, in the order they are trained on."""
    if stream.epochs is None:
        last = max(rows, min(stream.count_packs(1), SEEN) // rows * rows)
    else:
        last = min(len(stream), SEEN)  # a bounded stream may end with fewer rows
    starts = range(0, last, rows)
    return np.array([_tokens(stream, start, min(start + rows, last)) for start in starts], dtype=np.int64)


def _tokens(stream: Lengths, first: int, last: int) -> int:
    return sum(int(stream.lengths[source][sample]) for pack in range(first, last) for source, sample in stream[pack])


def choose(
    sizes: np.ndarray, largest: int, multiple: int = ALIGNED, most: int = MOST, waste: float = WASTE
) -> tuple[int, ...]:
    """Rising lengths, multiples of `multiple`, whose last one holds `largest` tokens: as few as keep padding below
    `waste` of the real tokens, `most` of those sizes at most. Where sizes beyond the seen ones are possible, one length
    more is for them."""
    step = aligned(multiple, largest)
    needed, counts = np.unique(-(-np.maximum(sizes, 1) // step) * step, return_counts=True)
    real = max(1, int(sizes.sum()))
    bounds = [int(needed[-1])]
    for number in range(1, min(most, len(needed)) + 1):
        bounds = _best(needed, counts, number)
        if padding(sizes, bounds) <= waste * real:
            break
    whole = -(-largest // step) * step
    return (*bounds, whole) if bounds[-1] < whole else tuple(bounds)


def aligned(multiple: int, largest: int) -> int:
    """What lengths are multiples of: what the layout and the kernels require."""
    return int(np.lcm(multiple, TILE if largest >= LONG else ALIGNED))


def _best(needed: np.ndarray, counts: np.ndarray, number: int) -> list[int]:
    """Of the lengths needed, those `number` that the least padding comes from: by dynamic programming over where each
    of them ends."""
    weight = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((number + 1, len(needed) + 1), np.inf)
    cost[0, 0] = 0
    before = np.zeros((number + 1, len(needed) + 1), dtype=np.int64)
    for k in range(1, number + 1):
        for end in range(1, len(needed) + 1):
            # All sizes between the bucket before and this one are padded to its length.
            options = cost[k - 1, :end] + needed[end - 1] * (weight[end] - weight[:end])
            before[k, end] = int(options.argmin())
            cost[k, end] = options[before[k, end]]
    bounds, end = [], len(needed)
    for k in range(number, 0, -1):
        bounds.append(int(needed[end - 1]))
        end = int(before[k, end])
    return bounds[::-1]


def fit(size: int, lengths: Sequence[int]) -> int:
    """The shortest of the rising lengths that holds this number of tokens."""
    for length in lengths:
        if size <= length:
            return length
    raise ValueError(f"{size} tokens do not fit a row of {lengths[-1]}")


def padding(sizes: np.ndarray, lengths: Sequence[int]) -> int:
    """Tokens of padding added to rows of these sizes."""
    bounds = np.array(lengths)
    return int((bounds[np.searchsorted(bounds, sizes)] - sizes).sum())
