"""ERNIEKit's own order and packs, for `compat: erniekit`: recorded runs come out micro-batch for micro-batch.

recipes/ builds these two instead of SampleOrder and PackStream; everything after them is the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappush, heapreplace
from math import ceil
from typing import Any

import numpy as np

from erniekit.data.mix import Drawn, gather, shares
from erniekit.data.pack import PackStream
from erniekit.errors import ConfigError, DataError

# ERNIEKit tokenises a row again at every draw, which strips the system text from the row it keeps in memory.
# So a row has two forms, `examples[s]` = int [rows that parsed, 2]: the sample it becomes the first time, and
# the one for every time after; -1 where assembling drops it. Dropped rows are shuffled and buffered as well.
Examples = Sequence[np.ndarray]


class CompatOrder:
    """Virtual epochs of `num_samples_each_epoch` draws, shuffled twice and read backwards (preferences: forwards)."""

    def __init__(
        self,
        examples: Examples,
        probs: Sequence[float] | None = None,
        *,
        seed: int,
        num_samples_each_epoch: int,
        shuffle: bool = True,
        backwards: bool = True,
    ) -> None:
        probs = [1.0] * len(examples) if probs is None else list(probs)
        shares(probs)  # the same refusals as the default order
        self.seed, self.shuffle, self.backwards = seed, shuffle, backwards
        self.examples = [np.asarray(e, dtype=np.int64) for e in examples]
        self._probs = probs
        self._live = [s for s, p in enumerate(probs) if p > 0]
        total = sum(p for p in probs if p > 0)
        self._draws = [int(probs[s] / total * num_samples_each_epoch) for s in self._live]
        for s, draws in zip(self._live, self._draws):
            if draws and not (self.examples[s][:, 1] >= 0).any():
                raise DataError(f"source {s + 1} has no usable sample", fix="set its probability to 0 or fix the file")
        if not sum(self._draws):
            raise ConfigError(
                f"num_samples_each_epoch={num_samples_each_epoch} leaves no sample to draw",
                where="num_samples_each_epoch",
                fix="raise it",
            )
        self._rewind()

    def epoch_size(self) -> int:
        return sum(self._draws)

    def pass_size(self) -> int:
        """Rows that ERNIEKit calls one epoch when it counts steps (num_train_epochs)."""
        if len(self._live) == 1:
            return len(self.examples[self._live[0]])
        return sum(ceil(len(self.examples[s]) * self._probs[s]) for s in self._live)

    def take(self, start: int, count: int) -> Drawn:
        return gather(self._epoch, self.epoch_size(), start, count)

    def _rewind(self) -> None:
        self._rng = random.Random(self.seed)  # one generator for all sources, as there
        self._rows = [list(range(len(self.examples[s]))) for s in self._live]
        self._seen = [np.zeros(len(rows), dtype=bool) for rows in self._rows]
        self._at = [0] * len(self._live)  # draws taken so far
        self._current, self._drawn = -1, (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def _epoch(self, epoch: int) -> Drawn:
        """Shuffles build on one another, so a later epoch is reached by replaying the ones before it."""
        if epoch < self._current:
            self._rewind()
        while self._current < epoch:
            self._current += 1
            self._drawn = self._next_epoch(self._current)
        return self._drawn

    def _next_epoch(self, epoch: int) -> Drawn:
        shuffler = np.random.RandomState(epoch)
        drawn = [np.array(self._next_rows(k), dtype=np.int64) for k in range(len(self._live))]
        if self.shuffle:
            for rows in drawn:
                shuffler.shuffle(rows)
        place = np.repeat(np.arange(len(self._live)), self._draws)
        row = np.concatenate(drawn)
        order = np.arange(len(place))
        if self.shuffle:
            shuffler.shuffle(order)
        order = order[::-1] if self.backwards else order
        place, row = place[order], row[order]
        index = np.empty(len(place), dtype=np.int64)
        for k, s in enumerate(self._live):
            here = np.flatnonzero(place == k)
            index[here] = self.examples[s][row[here], self._drawn_before(k, row[here])]
        return np.array(self._live)[place], index

    def _next_rows(self, k: int) -> list[int]:
        rows, want = self._rows[k], self._draws[k]
        out: list[int] = []
        while len(out) < want:
            offset = self._at[k] % len(rows)
            if offset == 0 and self.shuffle:
                self._rng.shuffle(rows)
            part = rows[offset : offset + want - len(out)]
            out += part
            self._at[k] += len(part)
        return out

    def _drawn_before(self, k: int, rows: np.ndarray) -> np.ndarray:
        """1 for each row drawn before, in this epoch or an earlier one; 0 at its first draw of the run."""
        again = np.ones(len(rows), dtype=np.int64)
        which, first = np.unique(rows, return_index=True)
        again[first[~self._seen[k][which]]] = 0
        self._seen[k][which] = True
        return again


class CompatPackStream(PackStream):
    """As PackStream; but greedy packing tokenises a sample that has to open a new pack a second time."""

    def __init__(self, order: CompatOrder, lengths: Sequence[np.ndarray], max_seq_len: int, **options: Any) -> None:
        super().__init__(order, lengths, max_seq_len, **options)
        self._compat = order
        self._again = []
        for s, examples in enumerate(order.examples):
            again = np.arange(len(lengths[s]))
            usable = examples[examples[:, 0] >= 0]
            again[usable[:, 0]] = usable[:, 1]
            self._again.append(again)

    def count_packs(self, epochs: float = 1) -> int:
        """An epoch is a pass over the rows here, not the virtual epoch that the order is made of."""
        start, packs, left = 0, 0, self._compat.pass_size()
        while left > 0:
            _, _, bins, taken = self._window(start, left)
            packs += max(bins, default=-1) + 1
            start, left = start + taken, left - taken
        return ceil(packs * epochs)

    def _greedy(self, source: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
        second = np.empty_like(index)
        for s in np.unique(source):
            second[source == s] = self._again[s][index[source == s]]
        lengths, index = self._of(self.lengths, source, index), index.copy()
        heap, bins = [(-self.max_seq_len, 0)], []  # (-free space, bin); the first pack is open from the start
        for at, length in enumerate(lengths):
            if length > -heap[0][0]:
                heappush(heap, (-self.max_seq_len, len(heap)))
                index[at] = second[at]
                length = int(self.lengths[source[at]][second[at]]) if second[at] >= 0 else 0
            free, bin_ = heap[0]
            bins.append(bin_)
            heapreplace(heap, (free + length, bin_))
        kept = index >= 0
        # a pack opened for a row that its second tokenising dropped may stay empty; those are not handed out
        _, compact = np.unique(np.array(bins)[kept], return_inverse=True)
        return source[kept], index[kept], compact.tolist()


class CompatPairStream(PackStream):
    """As PackStream; but the packer's buffer counts pairs, not rows: those that assembling drops take no place."""

    def __init__(
        self,
        order: CompatOrder | CompatEvalOrder,
        lengths: Sequence[np.ndarray],
        max_seq_len: int,
        **options: Any,
    ) -> None:
        super().__init__(order, lengths, max_seq_len, **options)
        self._compat = order

    def count_packs(self, epochs: float = 1) -> int:
        """Packs until as many pairs went by as there are rows: that is an epoch when ERNIEKit counts steps."""
        pairs = packs = 0
        while pairs < self._compat.pass_size():
            pairs += len(self[packs])
            packs += 1
        return ceil(packs * epochs)

    def _window(self, start: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray, list[int], int]:
        if not (self.packing and self.greedy):
            return super()._window(start, most)
        left = min(self._epoch - start % self._epoch, most or self._epoch)
        count = min(self.buffer_size, left)
        while True:
            source, index = self.order.take(start, count)
            kept = np.flatnonzero(index >= 0)
            if len(kept) >= self.buffer_size or count == left:
                break
            count = min(count + self.buffer_size - len(kept), left)
        if len(kept) == self.buffer_size:
            count = int(kept[-1]) + 1
        return *self._greedy(source[kept], index[kept]), count


class CompatEvalOrder:
    """How ERNIEKit goes through its preference evaluation set: shuffled as for training, each time it evaluates.

    `number` is how many evaluations came before. Packed by a CompatPairStream with epochs=1.
    """

    def __init__(self, examples: Examples, number: int, shuffle: bool = True) -> None:
        shuffler = np.random.RandomState(number)
        rows = [np.arange(len(forms)) for forms in examples]
        source = np.repeat(np.arange(len(rows)), [len(forms) for forms in examples])
        order = np.arange(len(source))
        if shuffle:
            for part in (*rows, order):
                shuffler.shuffle(part)
        index = np.concatenate([forms[part, 0] for forms, part in zip(examples, rows)])  # the file is read again
        self._drawn = source[order], index[order]

    def epoch_size(self) -> int:
        return len(self._drawn[0])

    def pass_size(self) -> int:
        return self.epoch_size()

    def take(self, start: int, count: int) -> Drawn:
        return gather(lambda epoch: self._drawn, self.epoch_size(), start, count)
