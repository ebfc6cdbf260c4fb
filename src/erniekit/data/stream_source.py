"""StreamSource: samples of files that are read while a run trains, in the order of their rows.

Opened by recipes/streaming.py; stream_order.py asks it for as many samples as the next packs take, and no row is read
before. One process of those that share the cache folder reads; stream_store.py keeps what it made of the rows.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from erniekit import heartbeat
from erniekit.data.chunks import Chunk
from erniekit.data.formats.files import RowPlace, file_encoding
from erniekit.data.preference import PARTS, PairSample
from erniekit.data.quality import repeated
from erniekit.data.report import SHOWN_LINES, DataReport
from erniekit.data.row_workers import Rows
from erniekit.data.storage import Unchanged, located
from erniekit.data.stream_store import ENDS, KEYS, PARTS_OF, StreamState, StreamStore
from erniekit.data.tokenise import BAD_ROWS, IDS, LABELS, TokeniseJob, add_counts, cut, readable
from erniekit.data.types import RowProblem, Sample
from erniekit.errors import DataError
from erniekit.files import OwnedFiles, own, settle
from erniekit.log import warn_once

CHUNK_ROWS = 64  # read and tokenised at once: what a loader's thread is away for
_POLL_S = 0.05
_CHANGED_FIX = "start a new run, with another output_dir, or bring the file back as it was"
JobOf = Callable[[str], TokeniseJob]


class Placed:
    """Rows, and the place behind the last of them that was asked for."""

    def __init__(self, rows: Iterator[tuple[int, Any, RowPlace | None]]) -> None:
        self._rows = rows
        self.place: RowPlace | None = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for number, raw, place in self._rows:
            self.place = place
            yield number, raw


class StreamSource:
    patches: np.ndarray | None = None  # rows with pictures are not streamed

    def __init__(
        self,
        name: str,
        files: Sequence[str],
        job_of: JobOf,
        fingerprint: str,
        store: StreamStore,
        max_bad_fraction: float,
        versions: Sequence[str] = (),
        bad_rows: Path | None = None,
    ) -> None:
        """name: what the recipe calls it. job_of: how rows of a file become samples; asked when its turn comes.
        versions: of the files that the fingerprint is of; a file whose turn comes later must still be of its version.
        bad_rows: where they are listed if they stop the run; beside the samples where it is not given."""
        self.name, self.files, self.fingerprint, self._versions = name, list(files), fingerprint, list(versions)
        self._job_of, self._store, self._max_bad = job_of, store, max_bad_fraction
        self._bad_rows = bad_rows
        self._first = job_of(self.files[0])  # a file that cannot be read is an error of the start
        self._encoding = file_encoding(self.files[0]).describe()
        self._chunks: Iterator[tuple[int, Rows, TokeniseJob, RowPlace | None] | int] | None = None
        self._reading = RLock()
        self._report: tuple[tuple[int, bool], DataReport] | None = None

    def fingerprint_under(self, rules: Mapping[str, Any]) -> str:
        """As TokenSource's; the rules are not known apart from the rest."""
        return self.fingerprint

    @property
    def path(self) -> str:
        """Where its first rows are."""
        return self.files[0]

    @property
    def size(self) -> int | None:
        """Samples of the whole source; None until its end was reached."""
        progress = self._store.look()
        return progress.samples if progress.ended else None

    def __len__(self) -> int:
        """Samples read so far."""
        return self._store.look().samples

    def require(self, count: int) -> bool:
        """Read on until there are so many samples. False: the source ends before."""
        return self._read_until(lambda progress: progress.samples >= count)

    def require_tokens(self, count: int) -> bool:
        """Read on until the samples have so many tokens together. False: the source ends before."""
        return self._read_until(lambda progress: progress.tokens >= count)

    @property
    def read_tokens(self) -> int:
        return self._store.look().tokens

    def _read_until(self, enough: Callable[[StreamState], bool]) -> bool:
        if enough(self._store.progress):
            return True
        with self._reading:
            while not enough(progress := self._store.look()):
                if progress.ended:
                    self._check(progress)
                    return False
                if self._store.writes or self._store.take_over():
                    self._read_on()
                else:  # another rank reads
                    time.sleep(_POLL_S)
                heartbeat.beat()
        return True

    def lengths_of(self, index: np.ndarray) -> np.ndarray:
        """Tokens of these samples, which are there."""
        if not len(index):
            return np.zeros(0, np.int64)
        first, last = int(index.min()), int(index.max())
        begin = max(0, first - 1)
        ends = self._store.read(ENDS, np.int64, begin, last + 1 - begin)
        return np.diff(ends, prepend=0 if first == 0 else ends[:1])[index - begin]

    def sample(self, index: int) -> Sample:
        ends = self._store.read(ENDS, np.int64, max(0, index - 1), 1 + (index > 0)).tolist()
        start, count = (0, ends[0]) if index == 0 else (ends[0], ends[1] - ends[0])
        ids, labels = (self._store.read(name, np.int32, start, count) for name in (IDS, LABELS))
        return Sample(ids, labels)

    @property
    def report(self) -> DataReport:
        """Of what has been read so far."""
        progress = self._store.look()
        if self._report is None or self._report[0] != (progress.samples, progress.ended):
            self._report = (progress.samples, progress.ended), self._reported(progress)
        return self._report[1]

    def list_bad_rows(self, to: Path, append: bool) -> None:
        """Those met so far, as a file of the run; append: behind those of other sources."""
        if not append:
            OwnedFiles(to.parent).remove(to.name)
        if text := self._store.text(BAD_ROWS):
            own(to)
            with open(to, "a", encoding="utf-8") as out:
                out.write(text)
            settle(to)

    def discard(self) -> None:
        """What was read is not needed again."""
        self._store.discard()

    def close(self) -> None:
        self._store.close()

    def _read_on(self) -> None:
        if self._chunks is None:
            self._chunks = self._chunks_from(self._store.progress)
        chunks, self._chunks = self._chunks, None  # after an error they are read again from what is stored
        after = copy.deepcopy(self._store.progress)
        part = next(chunks)
        if isinstance(part, int):
            after.file, after.taken, after.taken_check, after.ended = part, 0, 0, part == len(self.files)
            after.place = None
            self._store.append({}, after)
        else:
            number, rows, job, place = part
            after.file, after.taken, after.taken_check = number, after.taken + len(rows), _crc(rows, after.taken_check)
            after.place = place and (place.offset, place.row)
            self._store.append(self._added(job.work(rows), job, after), after)
        self._chunks = chunks
        self._check(after)

    def _chunks_from(self, at: StreamState) -> Iterator[tuple[int, Rows, TokeniseJob, RowPlace | None] | int]:
        """Chunks of rows with the number of their file, and the place behind them; after the last of a file, the number
        of the next. Rows that were taken before are passed over, unless their source can be read from there on."""
        for number in range(at.file, len(self.files)):
            path = self.files[number]
            job = self._first if number == 0 else self._job_of(path)
            stored = located(path)
            unchanged = Unchanged(stored, stored.stamp())
            if self._versions and stored.quick_identity() != self._versions[number]:
                raise DataError("dataset changed since the run began", where=path, fix=_CHANGED_FIX)
            taken, place = (at.taken, at.place) if number == at.file else (0, None)
            after = RowPlace(*place) if place is not None and stored.names_version else None
            if after is not None and not job.can_go_on(after):
                after = None
            found = Placed(job.rows(after))
            lines = readable(found, path)
            if taken and after is None:
                self._skip(lines, at, path)
            for rows in cut(lines, CHUNK_ROWS):
                yield number, rows, job, found.place
            unchanged.check()
            yield number + 1

    def _skip(self, lines: Iterator[tuple[int, Any]], at: StreamState, path: str) -> None:
        """Past the rows that are stored. A place that names no versions may hold others by now."""
        check = 0
        for row in islice(lines, at.taken):
            check = _crc([row], check)
            heartbeat.beat()
        if check != at.taken_check:
            raise DataError(
                "dataset changed: its first rows are not those that were read before", where=path, fix=_CHANGED_FIX
            )

    def _added(self, chunk: Chunk, job: TokeniseJob, after: StreamState) -> dict[str, bytes]:
        """What a chunk adds to the files; the rest of it goes into `after`."""
        report = self._stored_report(after)
        bad = add_counts(report, chunk, job.path)
        report.near_empty += len(chunk.near_empty)
        report.first_near_empty += chunk.near_empty[: SHOWN_LINES - len(report.first_near_empty)]
        after.report = report.to_dict()
        made = chunk.main
        ends = after.tokens + np.cumsum(made.lengths, dtype=np.int64)
        after.samples, after.tokens = after.samples + len(ends), after.tokens + len(made.ids)
        problems = [{"file": p.file, "line": p.line, "kind": p.kind, "reason": p.reason} for p in bad]
        return {
            IDS: made.ids.astype(np.int32).tobytes(),
            LABELS: made.labels.astype(np.int32).tobytes(),
            ENDS: ends.tobytes(),
            PARTS_OF: made.parts.tobytes(),
            KEYS: np.array(chunk.keys, np.uint64).reshape(-1, 2).tobytes(),
            BAD_ROWS: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in problems).encode(),
        }

    def _stored_report(self, progress: StreamState) -> DataReport:
        """The report as it is stored: counts that add up chunk by chunk."""
        stored = progress.report
        if not stored:
            return DataReport(self.name, self._first.format, thinking=self._first.thinking)
        report = DataReport.from_dict(stored, self.name)
        for name in ("first_bad", "first_dropped"):
            setattr(report, name, [RowProblem(**problem) for problem in stored[name]])
        return report

    def _reported(self, progress: StreamState) -> DataReport:
        report, read = self._stored_report(progress), self._store.read
        lengths = np.diff(read(ENDS, np.int64, 0, progress.samples), prepend=0)
        report.measure(lengths)
        if self._first.pairs is not None:
            self._first.measure(report, lengths, read(PARTS_OF, PARTS, 0, progress.samples))
        keys = read(KEYS, np.uint64, 0, progress.sizes[KEYS] // 8).reshape(-1, 2)
        same = repeated(keys[:, 1], keys[:, 0])
        report.duplicates = len(same)
        report.first_duplicates = same[:SHOWN_LINES] if len(self.files) == 1 else []  # lines of which file
        report.so_far = not progress.ended
        report.unused = dict(Counter(report.unused).most_common())
        report.encoding = self._encoding
        return report

    def _check(self, progress: StreamState) -> None:
        """The bound on bad rows holds for what was read. While that is little, one bad row is not a share yet."""
        report = self._stored_report(progress)
        too_many = report.bad_rows > max(1.0 if self._max_bad else 0.0, self._max_bad * report.rows)
        if progress.ended or too_many or report.breaks_off(self._max_bad):
            report, listed = self._reported(progress), self._bad_rows
            if report.is_too_bad(self._max_bad) and listed is not None and listed.parent.is_dir():
                self.list_bad_rows(listed, append=False)
            else:  # of a machine that does not see the run's folder
                listed = self._store.folder / BAD_ROWS
            report.check(self._max_bad, listed)


def _crc(rows: Rows, check: int) -> int:
    for line, raw in rows:
        content = raw if isinstance(raw, bytes) else repr(raw).encode("utf-8", "surrogatepass")
        check = zlib.crc32(content, zlib.crc32(b"%d\n" % line, check))
    return check


def file_versions(files: Sequence[str]) -> list[str]:
    """As their places name them: no file is read."""
    found = [located(path) for path in files]
    versions = [stored.quick_identity() for stored in found]
    for stored in found:
        if not stored.names_version:
            warn_once(f"{stored}: its server names no version of it; a change before a resume may go unnoticed")
    return versions


class PairStream(StreamSource):
    """Preference pairs that are read while a run trains."""

    def sample(self, index: int) -> PairSample:
        row = super().sample(index)
        return PairSample(row.ids, row.labels, *self._store.read(PARTS_OF, PARTS, index, 1)[0].item())


def stream_fingerprint(versions: Sequence[str], key_of: Callable[[str], str]) -> str:
    """Of the versions of all files. key_of: of the content and what becomes of it."""
    return key_of(hashlib.blake2b(json.dumps(versions).encode(), digest_size=20).hexdigest())
