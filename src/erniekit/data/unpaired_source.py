"""Judged answers of one file, each with the answer of another row to its prompt: what KTO's baseline is measured on.

Opened through token_cache.open_source with unpaired_rows; unpaired_collate.py lays the samples out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats import UNPAIRED_FORMATS, parsed, reader_of, sole_format
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.fields import refuse_media
from erniekit.data.report import DataReport
from erniekit.data.template import Turn
from erniekit.data.token_cache import PairSource, RowKind
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.types import RowProblem
from erniekit.data.unpaired import Unpaired, UnpairedSample, assemble_unpaired
from erniekit.errors import DataError
from erniekit.registry import Registry

_TRIES = 16  # rows looked at for one with another prompt


@dataclass(frozen=True)
class UnpairedJob(TokeniseJob):
    def more_key(self) -> dict[str, Any]:
        return {"rows": "unpaired"}

    @property
    def formats(self) -> Registry:
        return UNPAIRED_FORMATS

    def measure(self, report: DataReport, lengths: np.ndarray, parts: np.ndarray) -> None:
        report.measure_verdicts(lengths, parts)

    def read(self, raw: Any, line: int) -> Sequence[Unpaired] | RowProblem:
        def rows(row: Any) -> list[Unpaired]:
            if isinstance(row, dict):
                refuse_media(row)
            found: list[Unpaired] = reader_of(UNPAIRED_FORMATS, self.format, Unpaired, True)(row)
            return found

        return parsed(raw, line, self.path, rows, self.columns)

    def assemble(self, row: Unpaired, known: list[Turn] | None = None) -> Assembled | Dropped:
        assert self.pairs is not None
        return assemble_unpaired(row, self.tokenizer, self.max_seq_len, self.pairs, self.overlong, self.thinking)


class UnpairedSource(PairSource):
    """Which answer follows which prompt depends only on the file: the rows in a shuffled order, each with the
    answer of the one before it that has another prompt. It is the same in every layout and after a resume."""

    def __init__(self, folder: Path, report: DataReport) -> None:
        super().__init__(folder, report)
        if len(self) < 2:
            raise DataError(
                "one usable row: KTO measures its baseline on the answers of other rows",
                where=report.file,
                fix="give a file with more rows",
            )
        order = np.random.default_rng(0).permutation(len(self))
        self._before = np.empty(len(self), np.int64)
        self._before[order] = np.roll(order, 1)
        self._most = int(self.lengths.max())

    def sample(self, index: int) -> UnpairedSample:  # type: ignore[override]  # a pair of another kind
        own = self._judged(index)
        place = other = int(self._before[index])
        for _ in range(_TRIES):
            if place != index and self._prompt(place) != self._prompt(index):
                other = place
                break
            place = int(self._before[place])
        known = None if self.reference is None else tuple(self.reference[index].tolist())
        return replace(own, mismatched=self._judged(other).behind(own, self._most), reference=known)

    def _judged(self, index: int) -> UnpairedSample:
        prompt, _, _, verdict = self._parts[index].item()
        row = self.row_of(index)
        return UnpairedSample(row.ids, row.labels, prompt=prompt, desirable=verdict > 0)

    def _prompt(self, index: int) -> bytes:
        return self._judged(index).ids[: self._parts[index]["shared"]].tobytes()


def unpaired_rows(path: Any, format: str | None, columns: Columns = ()) -> RowKind:
    """format: a package's; rows of every other form have one reader."""
    return RowKind(sole_format(UNPAIRED_FORMATS, format), UnpairedJob, UnpairedSource)
