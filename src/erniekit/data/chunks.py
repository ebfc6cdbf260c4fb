"""What consecutive rows of a dataset became, on its way from a worker process to the cache files.

tokenise.py fills and writes it; a worker sends it as it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from erniekit.data.preference import PARTS, PairSample
from erniekit.data.report import DataReport
from erniekit.data.types import Sample
from erniekit.data.unpaired import UnpairedSample

# Numbers of an Assembled that add up in a DataReport, under the same name.
COUNTED = ("dropped_turns", "rewritten_turns", "truncated_tokens", "thoughts", "thoughts_in", "thought_tokens")

RefusedLine = tuple[int, str, str]  # line, kind, reason


@dataclass
class Arrays:
    """Samples end to end, as they go into the cache files."""

    ids: np.ndarray  # int32
    labels: np.ndarray  # int32
    lengths: np.ndarray  # int32, one per sample
    lines: np.ndarray  # int64, one per sample: where it came from
    parts: np.ndarray  # PARTS, one per pair or judged answer; none for plain samples

    @classmethod
    def join(cls, samples: list[tuple[int, Sample]]) -> Arrays:
        none = np.zeros(0, np.int32)
        return cls(
            np.concatenate([none, *(sample.ids for _, sample in samples)]),
            np.concatenate([none, *(sample.labels for _, sample in samples)]),
            np.array([len(sample.ids) for _, sample in samples], np.int32),
            np.array([line for line, _ in samples], np.int64),
            np.array(
                [sample.parts() for _, sample in samples if isinstance(sample, (PairSample, UnpairedSample))], PARTS
            ),
        )


@dataclass
class Chunk:
    """What consecutive rows became."""

    rows: int
    main: Arrays
    later: Arrays  # second forms (see compat.py)
    # compat only, per conversation its two forms: index into main, or -2 - index into later, or -1 where dropped
    forms: list[tuple[int, int]] = field(default_factory=list)
    bad: list[RefusedLine] = field(default_factory=list)
    dropped: list[RefusedLine] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)  # COUNTED, over all samples of `main`
    unused: Counter[str] = field(default_factory=Counter)  # field -> rows in which it holds something no reader takes
    keys: list[tuple[int, int]] = field(default_factory=list)  # (line, quality.py's key) of rows that could be read
    near_empty: list[int] = field(default_factory=list)  # their lines
    media: Any = None  # data/vision's columns of the samples in `main`


class MoreFiles(Protocol):
    """What a job writes into a cache folder besides ids and labels."""

    def add(self, chunk: Chunk) -> None: ...
    def finish(self, report: DataReport) -> None: ...
