"""Rows of one dataset file -> samples in a cache folder, on all cores.

token_cache.py calls `tokenise_file`. Nothing here imports torch, so workers (row_workers.py) start fast.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np

from erniekit import heartbeat
from erniekit.data.assemble import Assembled, Dropped, assemble
from erniekit.data.chunks import COUNTED, Arrays, Chunk, MoreFiles
from erniekit.data.formats import FORMATS, PREFERENCE_FORMATS, parse, parse_pair, rows
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.files import RowPlace, can_go_on, file_encoding, placed_rows
from erniekit.data.long_rows import LongRow
from erniekit.data.preference import PARTS, PairRules, Preference
from erniekit.data.preference_assemble import assemble_pair
from erniekit.data.quality import RowCounts, is_near_empty, row_key
from erniekit.data.report import FAULT, SHOWN, DataReport
from erniekit.data.row_workers import Rows, in_parallel
from erniekit.data.storage import as_place, is_remote
from erniekit.data.template import Turn
from erniekit.data.thinking import Thinking
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, UNREADABLE, Conversation, RowProblem, Sample
from erniekit.errors import DataError, ErnieKitError
from erniekit.printable import fault_of
from erniekit.progress import WorkProgress
from erniekit.registry import Registry

CHUNK_ROWS = 2000
CHUNK_BYTES = 4 << 20  # rows of a megabyte each must not pile up
IDS, LABELS, OFFSETS, ROWS = "ids.bin", "labels.bin", "offsets.npy", "rows.npy"
FORMS, PAIR_PARTS, BAD_ROWS = "forms.npy", "parts.npy", "bad_rows.jsonl"
MOST_FIELDS, OTHER_FIELDS = 1000, "(other names)"  # rows that are tables of their own must not fill the memory


@dataclass(frozen=True)
class TokeniseJob:
    """What decides a row's tokens, besides the row."""

    path: str
    format: str
    tokenizer: Tokenizer
    max_seq_len: int
    overlong: Literal["drop", "truncate"]
    compat: bool
    pairs: PairRules | None = None  # rows are preferences
    thinking: Thinking = "all"
    columns: Columns = ()
    chunk_rows: ClassVar[int] = CHUNK_ROWS

    @property
    def two_forms(self) -> bool:
        """Rows with a system text have a second form without it (see compat.py)."""
        return self.compat

    @property
    def formats(self) -> Registry:
        """The table that `format` is a name of."""
        return FORMATS if self.pairs is None else PREFERENCE_FORMATS

    def work(self, batch: Rows) -> Chunk:
        return tokenise_rows(batch, self)

    def rows(self, after: RowPlace | None = None) -> Iterator[tuple[int, Any, RowPlace | None]]:
        """Of its file, with the number of each and the place behind it, where there is one to go on at."""
        return placed_rows(self.path, after)

    def can_go_on(self, after: RowPlace) -> bool:
        return can_go_on(self.path, after)

    def more_files(self, folder: Path) -> MoreFiles | None:
        """Beside ids and labels."""
        return None

    def more_key(self) -> dict[str, Any]:
        """What the cache's key holds besides this class's own fields."""
        return {}

    def is_current(self, folder: Path) -> bool:
        """Whether what the rows refer to is as it was when `folder` was written."""
        return True

    def measure(self, report: DataReport, lengths: np.ndarray, parts: np.ndarray) -> None:
        """What the parts of its samples add to the report, where they have some."""
        report.measure_pairs(lengths, parts)

    def read(self, raw: Any, line: int) -> Sequence[Any] | RowProblem:
        """A Conversation or Preference each; another job's own noun."""
        if self.pairs is None:
            return parse(raw, line, self.path, self.format, self.compat, self.columns)
        pair = parse_pair(raw, line, self.path, self.format, self.compat, self.columns)
        return pair if isinstance(pair, RowProblem) else [pair]

    def assemble(self, row: Any, known: list[Turn] | None = None) -> Assembled | Dropped:
        """known: its turns, where they are rendered already."""
        limit, rules = self.max_seq_len, self.pairs
        if isinstance(row, Conversation):
            return assemble(row, self.tokenizer, limit, self.overlong, self.compat, self.thinking, known)
        assert rules is not None
        return assemble_pair(row, self.tokenizer, limit, rules, self.overlong, self.compat, self.thinking)


def tokenise_rows(batch: Rows, job: TokeniseJob) -> Chunk:
    out = Chunk(len(batch), Arrays.join([]), Arrays.join([]))
    main: list[tuple[int, Sample]] = []
    later: list[tuple[int, Sample]] = []

    def place(
        line: int, one: Conversation | Preference, into: list[tuple[int, Sample]], known: list[Turn] | None = None
    ) -> int:
        made = job.assemble(one, known)
        if isinstance(made, Assembled):
            into.append((line, made.sample))
            if into is main:
                out.sums.update({name: count for name in COUNTED if (count := getattr(made, name))})
            return len(into) - 1
        if into is main:
            out.dropped.append((line, made.kind, made.reason))
        return -1

    for line, raw in batch:
        try:
            parsed = job.read(raw, line)
            if isinstance(parsed, RowProblem):
                out.bad.append((line, parsed.kind, parsed.reason))
                continue
            out.unused.update(parsed[0].unused)
            out.keys.append((line, row_key(parsed)))
            out.near_empty += [line] * is_near_empty(parsed)
            row = LongRow(parsed, job.tokenizer, job.max_seq_len, job.compat)
            out.dropped += [(line, "overlong", row.too_long)] * (len(parsed) - row.may_fit)
            for number, one in enumerate(parsed[: row.may_fit]):
                first = second = place(line, one, main, row.turns(number))
                if not job.compat:
                    continue
                bare = _without_system(one)
                if bare is not None:
                    second = place(line, bare, later)
                    second = -2 - second if second >= 0 else -1
                out.forms.append((first, second))
        except ErnieKitError:
            raise
        except Exception as error:  # one odd row must not end hours of work: it is a bad row, and many stop it
            out.bad.append((line, FAULT, fault_of(error)))
    out.main, out.later = Arrays.join(main), Arrays.join(later)
    return out


def _without_system(row: Conversation | Preference) -> Conversation | Preference | None:
    """None where there is no system text."""
    messages = row.messages if isinstance(row, Conversation) else row.prompt
    if messages[0].role != "system":
        return None
    if isinstance(row, Conversation):
        return replace(row, messages=messages[1:])
    return replace(row, prompt=messages[1:])


def add_counts(report: DataReport, chunk: Chunk, path: str) -> list[RowProblem]:
    """What a chunk of `path` adds to a report, lengths and quality.py's counts apart; returns its bad rows."""
    report.rows += chunk.rows
    for name, count in chunk.sums.items():
        setattr(report, name, getattr(report, name) + count)
    for name, count in chunk.unused.items():
        known = name if name in report.unused or len(report.unused) < MOST_FIELDS else OTHER_FIELDS
        report.unused[known] = report.unused.get(known, 0) + count
    report.trained_tokens += int((chunk.main.labels != IGNORE).sum())
    bad, dropped = ([RowProblem(path, *one) for one in rows] for rows in (chunk.bad, chunk.dropped))
    for problems, counts, first in (
        (bad, report.bad, report.first_bad),
        (dropped, report.dropped, report.first_dropped),
    ):
        for one in problems:
            counts[one.kind] = counts.get(one.kind, 0) + 1
        first += problems[: SHOWN - len(first)]
    return bad


class SampleWriter:
    """Samples written so far: tokens in two files, a few numbers per sample in memory."""

    def __init__(self, ids: IO[bytes], labels: IO[bytes]) -> None:
        self.ids, self.labels, self.count = ids, labels, 0
        self.lengths, self.lines = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        self.parts = [np.zeros(0, PARTS)]

    def add(self, arrays: Arrays) -> None:
        self.ids.write(arrays.ids.tobytes())
        self.labels.write(arrays.labels.tobytes())
        self.lengths.append(arrays.lengths)
        self.lines.append(arrays.lines)
        self.parts.append(arrays.parts)
        self.count += len(arrays.lengths)


class Writer:
    """Appends chunks to a cache folder. Second forms are kept apart and come last, behind all first forms."""

    def __init__(
        self,
        job: TokeniseJob,
        main: SampleWriter,
        later: SampleWriter,
        bad_rows: IO[str],
        more: MoreFiles | None = None,
    ) -> None:
        self.job, self.main, self.later, self.bad_rows = job, main, later, bad_rows
        self._forms = [np.zeros((0, 2), np.int64)]
        self._rows = RowCounts()
        self.report = DataReport(job.path, job.format, thinking=job.thinking)
        self.more = more

    def add(self, chunk: Chunk) -> None:
        forms = np.array(chunk.forms, np.int64).reshape(-1, 2)
        if self.more is not None:
            self.more.add(chunk)
        if self.job.two_forms:
            forms[forms >= 0] += self.main.count
            forms[forms <= -2] -= self.later.count
            self._forms.append(forms)
        self.main.add(chunk.main)
        self.later.add(chunk.later)
        self._rows.add(chunk.keys, chunk.near_empty)
        for one in add_counts(self.report, chunk, self.job.path):
            bad_row = {"line": one.line, "kind": one.kind, "reason": one.reason}
            self.bad_rows.write(json.dumps(bad_row, ensure_ascii=False) + "\n")

    def finish(self, folder: Path) -> DataReport:
        self.report.measure(np.concatenate(self.main.lengths))
        if self.job.pairs is not None:
            self.job.measure(self.report, np.concatenate(self.main.lengths), np.concatenate(self.main.parts))
            np.save(folder / PAIR_PARTS, np.concatenate([*self.main.parts, *self.later.parts]))
        self.report.unused = dict(Counter(self.report.unused).most_common())
        self._rows.fill(self.report)
        self.report.encoding = file_encoding(self.job.path).describe()
        lengths = np.concatenate([*self.main.lengths, *self.later.lengths])
        np.save(folder / OFFSETS, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        np.save(folder / ROWS, np.concatenate([*self.main.lines, *self.later.lines]))
        if self.more is not None:
            self.more.finish(self.report)
        if self.job.two_forms:
            forms = np.concatenate(self._forms)
            forms[forms <= -2] = self.main.count - 2 - forms[forms <= -2]
            np.save(folder / FORMS, forms)
            for source, target in ((self.later.ids, self.main.ids), (self.later.labels, self.main.labels)):
                source.seek(0)
                shutil.copyfileobj(source, target)
        return self.report


def tokenise_file(job: TokeniseJob, folder: Path, num_proc: int, expected_rows: int | None = None) -> DataReport:
    """Fill `folder` from `job.path`; only a few chunks per core are in memory at a time."""
    chunks = cut(whole_rows(job.path), job.chunk_rows)
    head = list(islice(chunks, 2))
    if len(head) < 2 or num_proc < 2:  # a worker's start would cost more than it saves
        made: Iterable[Chunk] = (job.work(batch) for batch in chain(head, chunks))
    else:
        made = in_parallel(chain(head, chunks), job, num_proc)
    with ExitStack() as stack:
        main = SampleWriter(*(stack.enter_context(open(folder / name, "wb")) for name in (IDS, LABELS)))
        later = SampleWriter(*(stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in (IDS, LABELS)))
        bad_rows = stack.enter_context(open(folder / BAD_ROWS, "w", encoding="utf-8"))
        writer = Writer(job, main, later, bad_rows, job.more_files(folder))
        bar = stack.enter_context(WorkProgress(f"tokenising {Path(job.path).name}", expected_rows, "rows"))
        for chunk in made:
            writer.add(chunk)
            bar.add(chunk.rows)
            heartbeat.beat()
        return writer.finish(folder)


def whole_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Rows to the end of the data."""
    return readable(rows(path), path)


def readable(found: Iterable[tuple[int, Any]], path: str) -> Iterator[tuple[int, Any]]:
    """Of a remote file a part is not taken for the whole: a connection that is lost would look like its end."""
    remote = is_remote(as_place(path))
    for number, raw in found:
        if remote and isinstance(raw, RowProblem) and raw.kind == UNREADABLE:
            raise DataError(
                f"row {number:,}: {raw.reason}",
                where=path,
                fix="start the same command again once it can be read; copy and repair it if the file is damaged",
            )
        yield number, raw


def cut(lines: Iterator[tuple[int, Any]], most: int) -> Iterator[Rows]:
    batch: Rows = []
    size = 0
    for line, raw in lines:
        batch.append((line, raw))
        size += len(raw) if isinstance(raw, (bytes, str)) else 0
        if len(batch) >= most or size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
