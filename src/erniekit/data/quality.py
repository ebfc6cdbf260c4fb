"""What rows are like beyond being readable: repeated ones, nearly empty answers, lengths.

Counted by tokenise.py for a run's report, and by `erniekit data` and `erniekit data clean`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from erniekit.data.report import SHOWN_LINES, DataReport
from erniekit.data.types import ChatMessage, Conversation, ParsedRow

_BARS = " ▁▂▃▄▅▆▇█"
_PLACEHOLDERS = ("n/a", "na", "none", "null", "nan", "todo", "tbd", "undefined")
Read = Sequence[ParsedRow]  # what one row became


def row_key(read: Read) -> int:
    """64 bits that are the same for rows of the same content, whatever else they hold."""
    digest = hashlib.blake2b(digest_size=8)
    # of several conversations of a row each is how the next begins; of a pair judged one by one both answers count
    for one in read[-1:] if isinstance(read[-1], Conversation) else read:
        contents = one.contents()
        for part in contents.parts:
            for m in part:
                calls = json.dumps(m.tool_calls, sort_keys=True, default=str) if m.tool_calls else ""
                # a row that is read and not learnt is no copy of one that is learnt
                end = "\1" if m.trained else "\3"
                digest.update("\0".join((m.role, m.content, m.thought, calls, end)).encode("utf-8", "replace"))
            digest.update(b"\2")
        digest.update(json.dumps(contents.tools, sort_keys=True, default=str).encode("utf-8", "replace"))
        digest.update(contents.label.encode("utf-8", "replace"))
    return int.from_bytes(digest.digest(), "little")


def is_near_empty(read: Read) -> bool:
    """Some trained answer has no letter or digit, or is a placeholder such as N/A."""
    answers = (message for one in read for message in one.contents().answers)
    return any(_says_nothing(m) for m in answers if m.role == "assistant" and m.trained and not m.tool_calls)


def _says_nothing(message: ChatMessage) -> bool:
    text = message.content.strip()
    return text.lower() in _PLACEHOLDERS or not any(char.isalnum() for char in text)


def repeated(keys: np.ndarray, lines: np.ndarray) -> list[tuple[int, int]]:
    """(line, line of the first with the same content), of every row that repeats an earlier one, in order."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    same = np.concatenate([[False], keys[order][1:] == keys[order][:-1]])
    starts = np.maximum.accumulate(np.where(same, 0, np.arange(len(keys))))
    later = order[same]
    first = order[starts[same]]
    return sorted(zip(lines[later].tolist(), lines[first].tolist()))


class RowCounts:
    """Repeated and near-empty rows of a file, added in its order."""

    def __init__(self) -> None:
        self._keys = [np.zeros((0, 2), np.uint64)]
        self._near_empty = 0
        self._first: list[int] = []

    def add(self, keys: Sequence[tuple[int, int]], near_empty: Sequence[int]) -> None:
        """keys: (line, row_key); near_empty: lines."""
        self._keys.append(np.array(keys, np.uint64).reshape(-1, 2))
        self._near_empty += len(near_empty)
        self._first += near_empty[: SHOWN_LINES - len(self._first)]

    def fill(self, report: DataReport) -> None:
        keys = np.concatenate(self._keys)
        same = repeated(keys[:, 1], keys[:, 0])
        report.duplicates, report.first_duplicates = len(same), same[:SHOWN_LINES]
        report.near_empty, report.first_near_empty = self._near_empty, self._first


def size_of(read: Read) -> int:
    """Characters of the messages."""
    return sum(len(m.content) + len(m.thought) for part in read[-1].contents().parts for m in part)


def length_line(sizes: Counter[int], unit: str) -> str:
    """Quantiles, and a bar for each power of two."""
    values = np.array(sorted(sizes), np.int64)
    counts = np.array([sizes[int(value)] for value in values], np.int64)
    below, total = np.cumsum(counts), int(counts.sum())
    quantile = {name: int(values[np.searchsorted(below, q * total)]) for name, q in (("median", 0.5), ("p95", 0.95))}
    numbers_shown = {"min": int(values[0]), **quantile, "max": int(values[-1])}
    bins = np.bincount(np.ceil(np.log2(np.maximum(values, 1))).astype(int), weights=counts)
    first = int(np.flatnonzero(bins)[0])
    lowest = 2 ** (first - 1) + 1 if first else 1
    bars = "".join(_BARS[int(-(-8 * n // bins.max()))] for n in bins[first:])
    numbers = ", ".join(f"{name} {value:,}" for name, value in numbers_shown.items())
    return f"{unit}: {numbers}  {bars} ({lowest:,} to {2 ** (len(bins) - 1):,})"
