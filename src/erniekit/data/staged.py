"""Mixtures whose shares change at named packs, and rows in the order of their difficulty. For recipes/datasets.py.

Nothing is saved: which samples make pack p is a function of p, as without stages, so one number resumes a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import numpy as np

from erniekit.data.formats.files import decode, rows
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import Members, PackStream
from erniekit.data.types import RowProblem
from erniekit.errors import DataError

LENGTH = "length"  # the curriculum by tokens; any other value is a column

OrderOf = Callable[[Sequence[float], Sequence[int]], SampleOrder]  # (shares, draws of each source before) -> order


class StagedPacks(PackStream):
    """Packs of one stream after another. Each goes on with every source where the one before stopped: rows that only
    waited in the packer's window then come in the next pass."""

    def __init__(
        self,
        stages: Sequence[tuple[int, Sequence[float]]],
        order_of: OrderOf,
        lengths: Sequence[np.ndarray],
        max_seq_len: int,
        **options: Any,
    ) -> None:
        """stages: the first pack of each, from 0 upwards, and its shares."""
        self.stages, self._order_of = list(stages), order_of
        self._make = lambda order: PackStream(order, lengths, max_seq_len, **options)
        self._drawn = [0] * len(lengths)
        first = order_of(stages[0][1], self._drawn)
        super().__init__(first, lengths, max_seq_len, **options)  # the first stage defines what an epoch is
        self._streams = [self._make(first)]
        self._from = [pack for pack, _ in stages]

    def __getitem__(self, number: int) -> Members:
        with self._lock:
            stage = bisect_right(self._from, number) - 1
            while len(self._streams) <= stage:
                self._open_next()
            return self._streams[stage][number - self._from[stage]]

    def _open_next(self) -> None:
        at, before = len(self._streams), self._streams[-1]
        positions = before.positions_before(self._from[at] - self._from[at - 1])
        assert isinstance(before.order, SampleOrder)
        self._drawn = [a + b for a, b in zip(self._drawn, before.order.draws(positions, len(self._drawn)))]
        self._streams.append(self._make(self._order_of(self.stages[at][1], self._drawn)))


def difficulties(path: str, column: str, lines: Sequence[int]) -> np.ndarray:
    """float64 of each sample: the number in this column of the row it was made of. lines: those rows."""
    wanted, found = set(map(int, lines)), {}
    for number, raw in rows(path):
        if number in wanted and not isinstance(raw, RowProblem):
            found[number] = _number(decode(raw), column, path, number)
    return np.array([found[int(line)] for line in lines], dtype=np.float64)


def _number(row: Any, column: str, path: str, line: int) -> float:
    value = row.get(column) if isinstance(row, dict) else None
    if isinstance(value, str):  # of a CSV file
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        has = sorted(row) if isinstance(row, dict) else []
        raise DataError(
            f"curriculum: {column} is not a number in this row",
            where=f"{path}:{line}",
            fix=f"curriculum: {LENGTH}, or one of its columns: {', '.join(map(str, has[:8]))}"
            if value is None
            else "write a number in every row",
        )
    return float(value)
