"""Text files -> token files (PREFIX.bin + .idx, or PREFIX_ids.npy + _idx.npz), on all cores; a killed run goes on.

`erniekit data index` and pretrain.py (text that is trained on as it is) call `index_text`. Imports no torch.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from erniekit import log
from erniekit.data import cache_versions, mmap_files, sealed
from erniekit.data.cache_lock import only_one
from erniekit.data.index_files import (
    BAD,
    INDEX,
    SEQUENCES,
    SIZES,
    STATE,
    TOKENS,
    bad_rows_of,
    is_intact,
    is_plan,
    refuse_foreign,
    remove_work,
)
from erniekit.data.report import SHOWN, DataReport
from erniekit.data.row_workers import Rows, in_parallel
from erniekit.data.storage import LocalFile, Unchanged
from erniekit.data.text_job import TextChunk, TextJob
from erniekit.data.text_rows import Place, documents
from erniekit.data.tokenise import CHUNK_BYTES, CHUNK_ROWS
from erniekit.data.types import RowProblem
from erniekit.errors import ConfigError, DataError
from erniekit.files import refuse_special
from erniekit.files.part_file import part_file
from erniekit.files.unwritable import way_out
from erniekit.printable import counted

COMMIT_BYTES = 32 << 20  # of text; what a kill costs at most, besides what is under way
COMMIT_SECONDS = 10.0
_ENOUGH_ROWS = 1000  # none of the first rows up to this number usable: the key is wrong, not the rows


@dataclass
class State:
    """How far a run has come: what state.json holds, written after the bytes it describes are on disk."""

    place: Place = field(default_factory=Place)
    read: int = 0  # bytes of text
    rows: int = 0
    documents: int = 0
    bytes_of: dict[str, int] = field(default_factory=lambda: dict.fromkeys((TOKENS, SIZES, SEQUENCES, BAD), 0))
    bad: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    finished: bool = False


@dataclass
class Indexed:
    """The result of indexing: the data set's prefix, and the report also kept next to it."""

    prefix: str
    report: DataReport
    fresh: bool = True  # made by this call, or by an earlier one


def index_text(
    paths: Sequence[str | Path],
    output: str | Path,
    job: TextJob,
    *,
    format: str = "bin",
    num_proc: int = 1,
    max_bad_fraction: float = 0.001,
    identity: Any = None,
    unchanged: Sequence[Unchanged] | None = None,
    commit_bytes: int = COMMIT_BYTES,
) -> Indexed:
    """Make the data set `output` from `paths`. What another process has begun or made of the same is gone on with.

    `identity` identifies the text, as it is since `unchanged`; without it each file's size, date and digest do.
    """
    files = [Path(path).expanduser() for path in paths]
    unchanged = unchanged or [Unchanged(stored, stored.stamp()) for stored in map(LocalFile, files)]
    plan = _plan(files, job, format, identity)
    output = Path(output).expanduser()
    made = _made(output, files, format, plan)
    if made is None:
        work = output.with_name(output.name + ".indexing")
        refuse_foreign(output, work, format, plan)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with only_one(work) as only_holder:
                if (
                    not only_holder
                ):  # files cannot be locked here: another process that makes the same has a folder of its own
                    work = work.with_name(f"{work.name}-{platform.node()}-{os.getpid()}")
                made = _made(output, files, format, plan)
                if made is None:
                    refuse_foreign(output, work, format, plan)
                    work.mkdir(exist_ok=True)
                    run = _IndexRun(files, work, output, job, format, plan, unchanged, commit_bytes)
                    made = run.publish(run.report(num_proc), max_bad_fraction)
            lock = Path(f"{work}.lock")
            if lock.is_file() and not lock.is_symlink() and not lock.stat().st_size:
                lock.unlink()  # waiting processes hold it open, and find the result
        except OSError as error:
            raise DataError(f"tokens cannot be written: {error}", where=str(output), fix=way_out(error)) from error
    made.report.check(max_bad_fraction, bad_rows_of(output))
    return made


def _plan(files: Sequence[Path], job: TextJob, format: str, identity: Any) -> dict[str, Any]:
    """Everything the result depends on, as JSON gives it back."""
    size = np.iinfo(job.dtype).max
    if job.tokenizer.vocab_size - 1 > size:
        raise ConfigError(
            f"{job.dtype} holds tokens up to {size:,}; the vocabulary has {job.tokenizer.vocab_size:,}",
            where="--dtype",
            fix="leave it out: auto takes the narrowest that fits",
        )
    for file in files:
        refuse_special(file, DataError)
        if not file.is_file():
            what = "is a folder, not a file" if file.is_dir() else "does not exist"
            raise DataError(
                f"{file} {what}", where=str(file), fix="give files: .jsonl .txt .json .parquet, .gz of them"
            )
    if identity is None:
        identity = [[str(file), (stored := file.stat()).st_size, stored.st_mtime_ns] for file in files]
        content = {"content": [LocalFile(file).quick_identity() for file in files]}
    else:
        content = {}
    return content | {
        "text": identity,
        "rules": cache_versions.DOCUMENTS,
        "tokenizer": job.tokenizer.fingerprint,
        "json_key": job.json_key,
        "append_eos": job.append_eos,
        "dtype": job.dtype,
        "format": format,
    }


def _named(files: Sequence[Path]) -> str:
    return str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _made(output: Path, files: Sequence[Path], format: str, plan: dict[str, Any]) -> Indexed | None:
    """The data set that is there already, if it is this one."""
    pair = [Path(str(output) + suffix) for suffix in mmap_files.SUFFIXES[format]]
    if not pair[1].exists():  # published last
        return None
    try:
        stored = json.loads(Path(f"{pair[1]}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    if not is_plan(stored.get("plan"), plan):
        raise DataError(
            f"{pair[1]} exists and was made from other text, or with other settings",
            where=f"--output {output}",
            fix="give another --output, or remove it",
        )
    if not is_intact(output, format):
        raise DataError(
            f"{pair[0]} is no longer what was written: changed or damaged since",
            where=f"--output {output}",
            fix="remove it to index the text again, or give another --output",
        )
    report = DataReport.from_dict(stored["report"], _named(files))
    if len(files) > 1:
        report.first_bad = [RowProblem(**problem) for problem in stored["report"]["first_bad"]]
    return Indexed(str(output), report, fresh=False)


class _IndexRun:
    """One work folder: four files that grow, and how much of them is certain."""

    def __init__(
        self,
        files: Sequence[Path],
        work: Path,
        output: Path,
        job: TextJob,
        format: str,
        plan: dict[str, Any],
        unchanged: Sequence[Unchanged],
        commit_bytes: int,
    ) -> None:
        self.files, self.work, self.output, self.job, self.format = files, work, output, job, format
        self.plan, self.unchanged, self.commit_bytes = plan, unchanged, commit_bytes
        self.dtype = np.dtype(job.dtype).newbyteorder("<")
        self.state = self._begun()
        self.total = sum(file.stat().st_size for file in files)

    def _begun(self) -> State:
        try:
            stored = json.loads((self.work / STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.state = State()
            self._keep()  # before any other file: it records whose folder this is
            return self.state
        if not is_plan(stored.pop("plan", None), self.plan):
            if stored.get("finished"):  # refused for its bad rows, and the text was fixed since
                remove_work(self.work)
                self.work.mkdir(exist_ok=True)
                self.state = State()
                self._keep()
                return self.state
            raise DataError(
                "an unfinished run is here, of other text or with other settings",
                where=str(self.work),
                fix="give another --output, or remove that folder",
            )
        return State(**(stored | {"place": Place(*stored["place"])}))

    def report(self, num_proc: int) -> DataReport:
        """Read what is not read yet; then what all of it came to."""
        if not self.state.finished:
            with ExitStack() as stack:
                out = {name: stack.enter_context(self._reopened(name)) for name in self.state.bytes_of}
                if self.format == "npy" and not out[TOKENS].tell():  # space for what is known at the end
                    out[TOKENS].write(mmap_files.npy_head(self.dtype, 0))
                self._fill(out, num_proc, stack)
            self._close_index()
        state = self.state
        report = DataReport(_named(self.files), "text", rows=state.rows, bad=state.bad, seconds=round(state.seconds, 2))
        sizes, docs = self._arrays()
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        report.measure(np.diff(bounds[docs]))
        report.trained_tokens = report.tokens
        with open(self.work / BAD, encoding="utf-8") as listed:
            report.first_bad = [RowProblem(**json.loads(line)) for line in islice(listed, SHOWN)]
        return report

    def _reopened(self, name: str) -> IO[bytes]:
        file = open(self.work / name, "ab")  # noqa: SIM115  closed by the caller's stack
        if file.tell() < self.state.bytes_of[name]:
            file.close()
            raise DataError(f"{name} has lost bytes that were written", where=str(self.work), fix="remove that folder")
        file.truncate(self.state.bytes_of[name])
        return file

    def _fill(self, out: dict[str, IO[bytes]], num_proc: int, stack: ExitStack) -> None:
        state, before, began = self.state, self.state.read, time.monotonic()
        spent, committed = state.seconds, time.monotonic()
        bar = tqdm(
            total=self.total,
            initial=before,
            desc="indexing",
            unit="iB",
            unit_scale=True,
            unit_divisor=1024,
            delay=1,
            mininterval=0.2 if sys.stderr.isatty() else 30,
            leave=False,
            disable=not log.is_main_rank(),
        )
        stack.callback(bar.close)
        ends: deque[tuple[Place, int]] = deque()  # of the chunks on their way, in order
        chunks = self._chunks(ends)
        made: Iterable[TextChunk]
        if num_proc < 2 or self.total - before < CHUNK_BYTES:  # a worker's start would cost more than it saves
            made = map(self.job.work, chunks)
        else:
            made = in_parallel(chunks, self.job, num_proc)
        kinds = Counter(state.bad)
        for chunk in made:
            place, read = ends.popleft()
            out[TOKENS].write(chunk.tokens)
            out[SIZES].write(chunk.sizes.astype("<i4").tobytes())
            out[SEQUENCES].write(chunk.sequences.astype("<i4").tobytes())
            for line, kind, reason in chunk.bad:
                stored = asdict(RowProblem(str(self.files[place.file]), line, kind, reason))
                out[BAD].write((json.dumps(stored, ensure_ascii=False) + "\n").encode())
                kinds[kind] += 1
            if not state.documents and not len(chunk.sequences) and state.rows + chunk.rows >= _ENOUGH_ROWS:
                raise self._hopeless(state.rows + chunk.rows, chunk)
            bar.update(read - state.read)
            state = self.state = replace(
                state,
                place=place,
                read=read,
                rows=state.rows + chunk.rows,
                documents=state.documents + len(chunk.sequences),
                bad=dict(kinds),
                seconds=spent + time.monotonic() - began,
            )
            if read - before >= self.commit_bytes or time.monotonic() - committed >= COMMIT_SECONDS:
                self._commit(out)
                before, committed = read, time.monotonic()
        self._commit(out)

    def _hopeless(self, rows: int, chunk: TextChunk) -> DataError:
        """Not one usable row so far; the next try, with other settings, is to find no trace of this one."""
        remove_work(self.work)
        return DataError(
            f"none of the first {counted(rows, 'row')} can be used",
            where="\n       ".join(f"row {line}  {kind}: {reason}" for line, kind, reason in chunk.bad[:3]),
            fix=f"--json_key names the field that holds the text; `{self.job.json_key}` was looked for",
        )

    def _chunks(self, ends: deque[tuple[Place, int]]) -> Iterator[Rows]:
        place = self.state.place
        done = sum(file.stat().st_size for file in self.files[: place.file])
        for number in range(place.file, len(self.files)):
            place = place if number == place.file else Place(number)
            batch: Rows = []
            size = read = 0
            for found in documents(self.files[number], place):
                batch.append((found.row, found.raw))
                size += len(found.raw) if isinstance(found.raw, bytes) else 0
                place, read = found.after, found.read
                if len(batch) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                    ends.append((place, done + read))
                    yield batch
                    batch, size = [], 0
            done += self.files[number].stat().st_size
            if batch:
                ends.append((place, done))
                yield batch

    def _commit(self, out: dict[str, IO[bytes]]) -> None:
        try:
            for text in self.unchanged:
                text.check()
        except DataError:  # no next run goes on from a part of other text
            remove_work(self.work)
            raise
        for file in out.values():
            _settle(file)
        self.state = replace(self.state, bytes_of={name: file.tell() for name, file in out.items()})
        self._keep()

    def _keep(self) -> None:
        stored = asdict(self.state) | {"plan": self.plan, "place": list(self.state.place)}
        with part_file(self.work / STATE, sync=True) as file:
            json.dump(stored, file)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each sequence, and the document bounds among them."""
        sizes, sequences = (np.fromfile(self.work / name, "<i4") for name in (SIZES, SEQUENCES))
        return sizes, np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])

    def _close_index(self) -> None:
        sizes, docs = self._arrays()
        with open(self.work / INDEX, "wb") as file:
            if self.format == "bin":
                mmap_files.write_idx(file, self.dtype, sizes, docs)
            else:
                mmap_files.write_npz(file, sizes, docs)
            _settle(file)
        if self.format == "npy":
            with open(self.work / TOKENS, "r+b") as file:
                file.write(mmap_files.npy_head(self.dtype, int(sizes.sum(dtype=np.int64))))
                _settle(file)
        self.state = replace(self.state, finished=True)
        self._keep()

    def publish(self, report: DataReport, max_bad_fraction: float) -> Indexed:
        """Give the files their names, the index last: a data set is whole or not there."""
        report.check(max_bad_fraction, self.work / BAD)
        refuse_foreign(self.output, self.work, self.format, self.plan)  # what came while it was read
        tokens, index = (Path(str(self.output) + suffix) for suffix in mmap_files.SUFFIXES[self.format])
        if (self.work / TOKENS).exists():  # else a kill came between two of the steps below
            os.replace(self.work / TOKENS, tokens)
        listed = bad_rows_of(self.output)
        if report.bad:
            with part_file(listed, sync=True) as file:
                file.write((self.work / BAD).read_text(encoding="utf-8"))
        else:
            listed.unlink(missing_ok=True)
        files = {tokens.name: sealed.record(tokens), index.name: sealed.record(self.work / INDEX)}
        stored = {"plan": self.plan, "report": report.to_dict(), "files": files}
        with part_file(Path(f"{index}.json"), sync=True) as file:
            json.dump(stored, file)
        sealed.sync(index.parent)
        os.replace(self.work / INDEX, index)
        sealed.sync(index.parent)
        remove_work(self.work)
        return Indexed(str(self.output), report)


def _settle(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
