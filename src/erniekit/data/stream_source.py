"""StreamSource: samples of files that are read while a run trains, in the order of their rows.

Opened by recipes/streaming.py; stream_order.py reads as many samples as the next packs take, and no row is read
before. One process of those that share the cache folder reads; stream_store.py keeps what it made of the rows.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import RLock

import numpy as np

from erniekit import heartbeat
from erniekit.data.chunks import Chunk
from erniekit.data.formats.files import file_encoding
from erniekit.data.quality import repeated
from erniekit.data.report import SHOWN_LINES, DataReport
from erniekit.data.row_workers import Rows
from erniekit.data.storage import located
from erniekit.data.stream_store import ENDS, KEYS, StreamState, StreamStore
from erniekit.data.tokenise import BAD_ROWS, IDS, LABELS, TokeniseJob, add_counts, cut, whole_rows
from erniekit.data.types import RowProblem, Sample
from erniekit.errors import DataError
from erniekit.files import OwnedFiles, own, settle

CHUNK_ROWS = 64  # read and tokenised at once: what a loader's thread is away for
_POLL_S = 0.05
JobOf = Callable[[str], TokeniseJob]


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
    ) -> None:
        """name: what the recipe calls it. job_of: how rows of a file become samples; called when its turn comes."""
        self.name, self.files, self.fingerprint = name, list(files), fingerprint
        self._job_of, self._store, self._max_bad = job_of, store, max_bad_fraction
        self._first = job_of(self.files[0])  # a file that cannot be read is an error of the start
        self._encoding = file_encoding(self.files[0]).describe()
        self._chunks: Iterator[tuple[int, Rows, TokeniseJob] | int] | None = None
        self._reading = RLock()
        self._report: tuple[tuple[int, bool], DataReport] | None = None

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
        """Read on until there are this many samples. False: the source ends before."""
        progress = self._store.progress
        if progress.samples >= count:
            return True
        with self._reading:
            while (progress := self._store.look()).samples < count:
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
        after = copy.deepcopy(self._store.progress)
        part = next(self._chunks)
        if isinstance(part, int):
            after.file, after.taken, after.ended = part, 0, part == len(self.files)
            self._store.append({}, after)
        else:
            number, rows, job = part
            after.file, after.taken = number, after.taken + len(rows)
            self._store.append(self._added(job.work(rows), job, after), after)
        self._check(after)

    def _chunks_from(self, at: StreamState) -> Iterator[tuple[int, Rows, TokeniseJob] | int]:
        """Chunks of rows with the number of their file; after the last of a file, the number of the next."""
        for number in range(at.file, len(self.files)):
            path = self.files[number]
            job = self._first if number == 0 else self._job_of(path)
            stored = located(path)
            before, lines = stored.stamp(), whole_rows(path)
            for _ in range(at.taken if number == at.file else 0):
                next(lines, None)
                heartbeat.beat()
            for rows in cut(lines, CHUNK_ROWS):
                yield number, rows, job
            if before != stored.stamp():
                raise DataError("dataset changed while it was read", where=path, fix="start again once it is whole")
            yield number + 1

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
        report.measure(np.diff(read(ENDS, np.int64, 0, progress.samples), prepend=0))
        keys = read(KEYS, np.uint64, 0, progress.sizes[KEYS] // 8).reshape(-1, 2)
        same = repeated(keys[:, 1], keys[:, 0])
        report.duplicates, report.first_duplicates = len(same), same[:SHOWN_LINES]
        report.so_far = not progress.ended
        report.unused = dict(Counter(report.unused).most_common())
        report.encoding = self._encoding
        return report

    def _check(self, progress: StreamState) -> None:
        """The bound on bad rows holds for what was read. While that is little, one bad row is not a share yet."""
        report = self._stored_report(progress)
        if progress.ended or report.bad_rows > max(1.0 if self._max_bad else 0.0, self._max_bad * report.rows):
            self._reported(progress).check(self._max_bad, self._store.folder / BAD_ROWS)


def stream_fingerprint(files: Sequence[str], key_of: Callable[[str], str]) -> str:
    """Of the versions of all files, none of which is read for it. key_of: of the content and what becomes of it."""
    versions = [located(path).quick_identity() for path in files]
    return key_of(hashlib.blake2b(json.dumps(versions).encode(), digest_size=20).hexdigest())
