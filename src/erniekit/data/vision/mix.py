"""Two streams of packs in one, by whole optimiser steps: pictures, and text that keeps the language model in shape.

A PackOrder for the loader: pack p is a pure function of p, so one number resumes both streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

import numpy as np

from erniekit.data.loader import PackOrder
from erniekit.data.mix import Drawn
from erniekit.data.pack import Members, PackStream
from erniekit.errors import ConfigError


class ModalStream:
    """ratio: picture steps, text steps. Of each such group the text steps are spread evenly, or all come first, as in
    ERNIEKit. Text sources are numbered behind the picture sources."""

    epochs: int | None = None

    def __init__(
        self,
        pictures: PackStream,
        text: PackOrder,
        picture_sources: int,
        packs_per_step: int,
        ratio: Sequence[float],
        text_first: bool = False,
    ) -> None:
        if len(ratio) != 2 or min(ratio) < 0 or sum(ratio) <= 0:
            raise ConfigError(
                f"modality_ratio is {', '.join(map(str, ratio))}",
                where="modality_ratio",
                fix="two numbers, picture steps and text steps, e.g. [1,1]",
            )
        self.pictures, self.text, self.offset = pictures, text, picture_sources
        self.packs_per_step, self.text_first = packs_per_step, text_first
        seen, read = (Fraction(str(share)) for share in ratio)
        self._share, self._group = read / (seen + read), seen + read
        self.max_seq_len = pictures.max_seq_len

    def text_steps(self, steps: int) -> int:
        """Of the first steps up to this number, how many read text."""
        if not self.text_first:
            return floor(steps * self._share)
        whole, rest = divmod(steps, self._group)
        read = self._share * self._group
        return floor(whole * read) + min(floor(rest), ceil(read))

    def is_text(self, step: int) -> bool:
        return self.text_steps(step + 1) > self.text_steps(step)

    def __getitem__(self, number: int) -> Members:
        step, within = divmod(number, self.packs_per_step)
        before = self.text_steps(step)
        if self.is_text(step):
            return [(self.offset + s, i) for s, i in self.text[before * self.packs_per_step + within]]
        return self.pictures[(step - before) * self.packs_per_step + within]

    def __len__(self) -> int:
        raise TypeError("this stream has no end; count_packs(epochs) counts a part of it")

    def count_packs(self, epochs: float = 1) -> int:
        """An epoch is one of the pictures."""
        if self._share == 1:
            raise ConfigError("modality_ratio gives the pictures no step", where="modality_ratio", fix="e.g. [1,1]")
        return ceil(self.pictures.count_packs(epochs) / (1 - self._share))


class CompatVisionOrder:
    """ERNIEKit's order of rows with pictures, as one reader without helpers draws it; no seed of the run counts.

    A pass over the sources draws int(share * all rows) times from each, in an order of its own; a source that is used
    up is shuffled once more, always by the same permutation.
    """

    def __init__(self, rows: Sequence[np.ndarray], probs: Sequence[float]) -> None:
        """rows: of each source, the sample that each of its rows became; -1: none."""
        total = sum(len(row) for row in rows)
        weights = [prob / sum(probs) for prob in probs]
        drawn = [s for s, weight in enumerate(weights) for _ in range(int(weight * total))]
        np.random.RandomState(87_000).shuffle(drawn)
        self._sources = np.array(drawn, np.int64)
        self._count = [int((self._sources == s).sum()) for s in range(len(rows))]
        self._rank = np.zeros(len(drawn), np.int64)  # which draw of its source it is
        for s in range(len(rows)):
            self._rank[self._sources == s] = np.arange(self._count[s])
        self._rows = [np.asarray(row) for row in rows]
        self._shuffled = [np.array(_permutation(len(row)), np.int64) for row in rows]
        self._passes: list[list[np.ndarray]] = [[] for _ in rows]

    def epoch_size(self) -> int:
        return len(self._sources)

    def take(self, start: int, count: int) -> Drawn:
        place = np.arange(start, start + count)
        passed, at = np.divmod(place, len(self._sources))
        source = self._sources[at]
        index = np.empty(count, np.int64)
        for k in range(count):
            s = int(source[k])
            number = int(passed[k]) * self._count[s] + int(self._rank[at[k]])
            index[k] = self._row(s, number)
        return source, index

    def _row(self, source: int, number: int) -> int:
        passes, size = self._passes[source], len(self._rows[source])
        while len(passes) <= number // size:
            before = passes[-1] if passes else np.arange(size)
            passes.append(before[self._shuffled[source]])
        return int(self._rows[source][passes[number // size][number % size]])


def _permutation(size: int) -> list[int]:
    out = list(range(size))
    np.random.RandomState(97).shuffle(out)
    return out
