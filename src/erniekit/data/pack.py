"""Samples -> packs: which samples share one row of max_seq_len tokens. Pack number p is a pure function of p.

The loader and the step estimate use a PackStream; it looks at lengths only, so skipping ahead reads no token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappush, heapreplace
from math import ceil
from threading import RLock

import numpy as np

from erniekit.data.mix import DrawOrder
from erniekit.errors import DataError

Members = list[tuple[int, int]]  # (source, sample) of each document of a pack, in row order
_REPLAY_LIMIT = 4_000_000  # samples; an estimate over more takes later epochs to be like the first ones
_REPLAY_EPOCHS = 100
_WINDOWS_KEPT = 8  # loader threads may be a few windows apart


def fill_greedy(lengths: Sequence[int], space: int) -> list[int]:
    """Bin of each sample: the one with the most free space (the first of equals), or a new one if none has."""
    heap: list[tuple[int, int]] = []  # (-free space, bin)
    bins = []
    for length in lengths:
        if heap and length <= -heap[0][0]:
            free, bin_ = heap[0]
            heapreplace(heap, (free + length, bin_))
        else:
            bin_ = len(heap)
            heappush(heap, (length - space, bin_))
        bins.append(bin_)
    return bins


def fill_in_order(lengths: Sequence[int], space: int) -> list[int]:
    """Bin of each sample: the current one, or a new one if it does not fit."""
    bins, bin_, used = [], -1, space
    for length in lengths:
        used += length
        if used > space:
            bin_, used = bin_ + 1, length
        bins.append(bin_)
    return bins


def fill_both(lengths: Sequence[int], space: int, costs: Sequence[int], most: int, greedy: bool) -> list[int]:
    """As the two above, with a second budget: the costs of a bin are `most` at most, or those of one sample that costs
    more by itself."""
    free: list[list[int]] = []  # of each bin: space, cost left
    bins = []
    for length, cost in zip(lengths, costs):
        open_ = range(len(free)) if greedy else range(max(0, len(free) - 1), len(free))
        fits = [b for b in open_ if length <= free[b][0] and cost <= free[b][1]]
        if fits:
            bin_ = max(fits, key=lambda b: (free[b][0], -b))
        else:
            bin_ = len(free)
            free.append([space, most])
        free[bin_][0] -= length
        free[bin_][1] -= cost
        bins.append(bin_)
    return bins


class PackStream:
    """`stream[p]` is pack p. Packs are made window by window along the order, and no window crosses an epoch.

    greedy: windows of `buffer_size` samples, each by `fill_greedy`; off: the whole epoch by `fill_in_order`.
    `packing` off: one sample per pack.
    `epochs` bounds the stream (evaluation: 1); without it there is always a next pack.
    costs: of each sample, besides its tokens (patches); a pack has `max_cost` of them at most.
    """

    def __init__(
        self,
        order: DrawOrder,
        lengths: Sequence[np.ndarray],
        max_seq_len: int,
        *,
        packing: bool = True,
        greedy: bool = True,
        buffer_size: int = 500,
        epochs: int | None = None,
        costs: Sequence[np.ndarray] = (),
        max_cost: int | None = None,
    ) -> None:
        for number, source in enumerate(lengths):
            if len(source) and int(source.max()) > max_seq_len:
                raise DataError(
                    f"a sample of {int(source.max())} tokens does not fit max_seq_len={max_seq_len}",
                    where=f"source {number + 1}",
                    fix="tokenise again with this max_seq_len, or raise it",
                )
        self.order, self.lengths, self.max_seq_len, self.epochs = order, list(lengths), max_seq_len, epochs
        self.packing, self.greedy, self.buffer_size = packing, greedy, buffer_size
        self.costs, self.max_cost = list(costs) if max_cost else [], max_cost or 0
        self._epoch = self._epoch_of(order)
        self._starts = [0]  # position where window w begins ...
        self._first = [0]  # ... and the number of its first pack
        self._windows: OrderedDict[int, list[Members]] = OrderedDict()
        self._lock = RLock()

    def __getitem__(self, number: int) -> Members:
        with self._lock:
            while self._first[-1] <= number:
                if not self._advance():
                    raise IndexError(f"pack {number} of {self._first[-1]}")
            window = bisect_right(self._first, number) - 1
            return self._members(window)[number - self._first[window]]

    def __iter__(self) -> Iterator[Members]:
        number = 0
        while self.epochs is None or number < len(self):
            yield self[number]
            number += 1

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("this stream has no end; count_packs(epochs) counts a part of it")
        return self._packs_before(self.epochs)

    def count_packs(self, epochs: float = 1) -> int:
        """Packs in this number of epochs. Shuffled epochs differ by a pack or so: each is replayed while cheap."""
        replayed = max(1, min(_REPLAY_LIMIT // self._epoch, _REPLAY_EPOCHS))
        if epochs > replayed:
            return ceil(self._packs_before(replayed) * epochs / replayed)
        whole = self._packs_before(int(epochs))
        return whole + ceil((self._packs_before(ceil(epochs)) - whole) * (epochs - int(epochs)))

    def _packs_before(self, epoch: int) -> int:
        with self._lock:
            while self._starts[-1] < epoch * self._epoch and self._advance():
                pass
            return self._first[bisect_left(self._starts, epoch * self._epoch)]

    def positions_before(self, pack: int) -> int:
        """Of the order, those that the windows of all packs before this one take."""
        with self._lock:
            while self._first[-1] < pack and self._advance():
                pass
            return self._starts[bisect_left(self._first, pack)]

    def _advance(self) -> bool:
        """Count the packs of the next unseen window; False at the end of a bounded stream."""
        start = self._starts[-1]
        if self.epochs is not None and start >= self.epochs * self._epoch:
            return False
        _, _, bins, taken = self._window(start)
        self._starts.append(start + taken)
        self._first.append(self._first[-1] + (max(bins) + 1 if bins else 0))
        return True

    def _members(self, window: int) -> list[Members]:
        if window not in self._windows:
            source, index, bins, _ = self._window(self._starts[window])
            packs: list[Members] = [[] for _ in range(max(bins) + 1)]
            for member, bin_ in zip(zip(source.tolist(), index.tolist()), bins):
                packs[bin_].append(member)
            self._windows[window] = packs
            while len(self._windows) > _WINDOWS_KEPT:
                self._windows.popitem(last=False)
        return self._windows[window]

    def _window(self, start: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray, list[int], int]:
        """The window at position `start`, of `most` positions at most: its samples' sources and indices, their bins,
        and the positions it takes."""
        count = self.buffer_size
        while True:
            left = self._left(start, count + 1)
            left = min(left, most or left)
            count = min(count, left)
            source, index = self.order.take(start, count)
            kept = np.flatnonzero(index >= 0)
            source, index = source[kept], index[kept]
            if not self.packing:
                return source, index, list(range(len(index))), count
            if self.greedy:
                return *self._greedy(source, index), count
            bins = self._fill(source, index, False)
            if count == left:
                return source, index, bins, count
            if bins and bins[-1] > 0:  # the last pack may go on: it begins the next window
                cut = bisect_left(bins, bins[-1])
                return source[:cut], index[:cut], bins[:cut], int(kept[cut])
            count *= 2

    def _epoch_of(self, order: DrawOrder) -> int:
        return order.epoch_size()

    def _left(self, start: int, wanted: int) -> int:
        """Positions up to the end of the epoch; at least `wanted` where it is further away."""
        return self._epoch - start % self._epoch

    def _greedy(self, source: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
        return source, index, self._fill(source, index, True)

    def _fill(self, source: np.ndarray, index: np.ndarray, greedy: bool) -> list[int]:
        lengths = self._of(self.lengths, source, index)
        if self.costs:
            return fill_both(lengths, self.max_seq_len, self._of(self.costs, source, index), self.max_cost, greedy)
        return (fill_greedy if greedy else fill_in_order)(lengths, self.max_seq_len)

    @staticmethod
    def _of(numbers: Sequence[np.ndarray], source: np.ndarray, index: np.ndarray) -> list[int]:
        if len(numbers) == 1:
            return numbers[0][index].tolist()
        out = np.empty(len(index), dtype=np.int64)
        for s in np.unique(source):
            here = source == s
            out[here] = numbers[s][index[here]]
        return out.tolist()
