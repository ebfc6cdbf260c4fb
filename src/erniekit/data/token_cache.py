"""The token cache: a dataset file is tokenised once per content, format, tokenizer and rules; then only read.

recipes/ open their sources here; the loader asks a TokenSource for samples, the packer for their lengths.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from erniekit.data import cache_versions, sealed
from erniekit.data.cache_lock import only_one
from erniekit.data.formats import FORMATS, PREFERENCE_FORMATS, check_columns, detect
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.files import is_array_by_name
from erniekit.data.preference import PairRules, PairSample
from erniekit.data.processes import started
from erniekit.data.report import FAULT, BadRowsFile, DataReport
from erniekit.data.storage import Identity, as_place, located
from erniekit.data.thinking import Thinking
from erniekit.data.tokenise import BAD_ROWS, FORMS, IDS, LABELS, OFFSETS, PAIR_PARTS, ROWS, TokeniseJob, tokenise_file
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Sample
from erniekit.errors import DataError
from erniekit.files import OwnedFiles, own, settle
from erniekit.files.cache_folder import default_cache_dir
from erniekit.files.unwritable import way_out
from erniekit.registry import Registry

REPORT = "report.json"


class TokenSource:
    """Samples of one file, read by position: what is resident does not grow with the file or with use."""

    _path = ""
    _job: TokeniseJob | None = None
    patches: np.ndarray | None = None  # of each sample's pictures, where it has some

    def __init__(self, folder: Path, report: DataReport) -> None:
        self.folder, self.report = folder, report
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        self._rows = np.load(folder / ROWS, mmap_mode="r")
        self.lengths = np.diff(self._offsets).astype(np.int32)  # second forms, if any, after all first ones
        self._files = [os.open(folder / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for name in (IDS, LABELS)]

    @property
    def path(self) -> str:
        """Where its rows are, to read them again; a report names it without passwords."""
        return self._path or self.report.file

    @property
    def fingerprint(self) -> str:
        """Of the content, and of all that turns it into samples."""
        return self.folder.name

    def fingerprint_under(self, rules: Mapping[str, Any]) -> str:
        """What it would be with other values of its job's fields; as it is where they are not known."""
        if not rules or self._job is None:
            return self.fingerprint
        return cache_key(replace(self._job, **rules), self.report.content)

    def __len__(self) -> int:
        return self.report.samples

    def sample(self, index: int) -> Sample:
        start, count = int(self._offsets[index]), int(self.lengths[index])
        ids, labels = (np.frombuffer(os.pread(f, 4 * count, 4 * start), np.int32) for f in self._files[:2])
        if len(ids) != count or len(labels) != count:
            raise DataError("the token cache was changed while in use", where=str(self.folder), fix="start again")
        return Sample(ids, labels)

    def row(self, index: int) -> int:
        """The line (JSONL) or row number the sample came from."""
        return int(self._rows[index])

    def forms(self) -> np.ndarray:
        """For compat.py: the two samples of every conversation; -1 where one was dropped."""
        return np.load(self.folder / FORMS)

    def __del__(self) -> None:
        for file in getattr(self, "_files", ()):
            os.close(file)


class PairSource(TokenSource):
    """Preference pairs of one file."""

    def row_of(self, index: int) -> Sample:
        """Its ids and labels alone."""
        return super().sample(index)

    def __init__(self, folder: Path, report: DataReport) -> None:
        super().__init__(folder, report)
        self._parts = np.load(folder / PAIR_PARTS, mmap_mode="r")
        self.reference: np.ndarray | None = None  # float32 [pairs, 2]: log-prob sums of both answers, where kept

    def sample(self, index: int) -> PairSample:
        row = self.row_of(index)
        kept = None if self.reference is None else tuple(self.reference[index].tolist())
        return replace(PairSample(row.ids, row.labels, *self._parts[index].item()), reference=kept)


class RowKind(NamedTuple):
    """How rows are read and what they are kept as."""

    name: str  # the format, or what is said in its place
    job: Callable[..., TokeniseJob]
    source: type[TokenSource]


KindOf = Callable[[str | Path, str | None, Columns], RowKind]  # of a file, its format if that is given, and its columns


@dataclass(frozen=True)
class RowRules:
    """What decides the tokens of rows, beside their file, its format and the tokenizer."""

    max_seq_len: int
    overlong: Literal["drop", "truncate"] = "drop"
    compat: bool = False
    pairs: PairRules | None = None  # rows are preferences, or of a kind that is cut by the same rules
    thinking: Thinking = "all"
    columns: Columns = ()
    kind: KindOf | None = None  # rows that are neither conversations nor pairs


def open_source(
    path: str | Path,
    format: str | None,
    tokenizer: Tokenizer,
    rules: RowRules,
    *,
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    max_bad_fraction: float = 0.001,
    bad_rows: BadRowsFile | None = None,
    append_bad_rows: bool = False,
) -> TokenSource:
    """Tokenise `path`, or find it done. With `rules.pairs` its rows are preferences, and the result is a PairSource;
    with `rules.kind` both are that kind's.
    DataError when too many rows are bad or none is usable; all bad rows are written to `bad_rows` either way."""
    path = as_place(path)
    kind = row_kind(path, format, rules)
    job = _job(kind, path, tokenizer, rules)
    source = kind.source(*tokenised(job, cache_dir, num_proc, max_bad_fraction, bad_rows, append_bad_rows))
    source._path, source._job = str(path), job
    return source


def row_job(path: str | Path, format: str | None, tokenizer: Tokenizer, rules: RowRules) -> TokeniseJob:
    """How rows of a file become samples; its format is found out where it is not given."""
    path = as_place(path)
    return _job(row_kind(path, format, rules), path, tokenizer, rules)


def row_kind(path: str | Path, format: str | None, rules: RowRules) -> RowKind:
    """DataError for columns that the file does not have, and for rows that the stage cannot use."""
    if rules.columns and format:  # without a format detection looks at them
        check_columns(path, rules.columns)
    if rules.kind is not None:
        return rules.kind(path, format, rules.columns)
    pairs = rules.pairs is not None
    format = format or _detected(path, pairs, rules.columns)
    (PREFERENCE_FORMATS if pairs else FORMATS).get(format)  # an unknown name is said before the file is read
    return RowKind(format, TokeniseJob, PairSource if pairs else TokenSource)


def _job(kind: RowKind, path: str | Path, tokenizer: Tokenizer, rules: RowRules) -> TokeniseJob:
    compat = rules.compat and rules.kind is None  # ERNIEKit has no other kinds
    limits = (rules.max_seq_len, rules.overlong, compat)
    return kind.job(str(path), kind.name, tokenizer, *limits, rules.pairs, rules.thinking, rules.columns)


def tokenised(
    job: TokeniseJob,
    cache_dir: str | Path | None,
    num_proc: int | None,
    max_bad_fraction: float,
    bad_rows: BadRowsFile | None,
    append_bad_rows: bool,
) -> tuple[Path, DataReport]:
    """The cache folder of a job, filled now or found whole, and its report, within the bound on bad rows."""
    content = identity_of(job.path)
    folder = Path(cache_dir or default_cache_dir()) / "tokens" / cache_key(job, content.digest)
    report = _opened(folder, job)
    if report is None:
        report = _build(folder, job, num_proc or cores(), content)
    report.content = content.digest
    if bad_rows is not None and bad_rows.is_written:
        _list_bad_rows(folder, report, bad_rows.path, append_bad_rows)
    report.check(max_bad_fraction, folder / BAD_ROWS if bad_rows is None else bad_rows.path)
    return folder, report


def open_sources(
    paths: Sequence[str | Path], formats: Sequence[str | None], tokenizer: Tokenizer, rules: RowRules, **cache: Any
) -> list[TokenSource]:
    """`open_source` for each; their bad rows share one file."""
    return [
        open_source(path, format, tokenizer, rules, append_bad_rows=number > 0, **cache)
        for number, (path, format) in enumerate(zip(paths, formats))
    ]


def _detected(path: str | Path, pairs: bool, columns: Columns) -> str:
    found = detect(path, columns=columns)
    if found.preference and not pairs:
        raise preference_rows(path)
    if pairs and not found.preference:
        raise not_pairs(path, found.why)
    return found.format


def not_pairs(path: str | Path, why: str, what: str = "DPO") -> DataError:
    """For a stage that compares two answers of a row."""
    return DataError(
        f"these rows hold no preference pairs: {why}",
        where=str(path),
        fix=f"{what} compares two answers: `chosen` and `rejected`, or `response` and `sort`; `stage: SFT` learns one",
    )


def preference_rows(path: str | Path) -> DataError:
    """For a stage that learns one answer of a row."""
    return DataError("these rows hold preference pairs", where=str(path), fix="set `stage: DPO` for them")


def cores() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, 32)


def identity_of(path: str | Path) -> Identity:
    """Of the file's content."""
    return located(path).identity()


def cache_key(job: TokeniseJob, content: str) -> str:
    """Of a content and all that turns it into samples."""
    told = {
        "version": cache_versions.SAMPLES,
        "content": content,
        "format": job.format,
        "tokenizer": job.tokenizer.fingerprint,
        "template": job.tokenizer.chat_template,
        "max_seq_len": job.max_seq_len,
        "overlong": job.overlong,
        "compat": job.compat,
        "thinking": job.thinking,
        "pairs": asdict(job.pairs) if job.pairs else None,
        **({"columns": job.columns} if job.columns else {}),
        **({"array": True} if is_array_by_name(located(job.path).name) else {}),  # the same bytes are one row elsewhere
        **job.more_key(),
        **_reader_key(job.format, job.formats),
    }
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def _reader_key(format: str, table: Registry) -> dict[str, str]:
    """Of a format that an installed package brings: with another version or another text it may read rows otherwise."""
    package = table.distribution(format) if format in table else ""
    if not package:
        return {}
    source = inspect.getsourcefile(table.get(format))
    text = Path(source).read_bytes() if source else b""
    return {"reader": f"{package} {hashlib.blake2b(text, digest_size=16).hexdigest()}"}


def _opened(folder: Path, job: TokeniseJob) -> DataReport | None:
    """The report of a whole cache folder; None when there is none, or it is damaged."""
    try:
        told = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        if not sealed.intact(folder, told["files"]) or not job.is_current(folder):
            return None
        report = DataReport.from_dict(told["report"], job.path)
        if FAULT in report.bad and (folder / REPORT).stat().st_mtime < started():
            return None  # a bug counts for the run that met it: the next one may have been repaired
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    report.from_cache = True
    return report


def _build(folder: Path, job: TokeniseJob, num_proc: int, content: Identity) -> DataReport:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with only_one(folder) as alone:
            report = _opened(folder, job)  # another process may have been first
            if report is None:
                report = _write(folder, job, num_proc, content, alone)
            return report
    except OSError as error:
        raise DataError(
            f"the token cache cannot be written: {error}",
            where=str(folder),
            fix=f"{way_out(error)}, or set ERNIEKIT_CACHE to a folder on another disk",
        ) from error


def _write(folder: Path, job: TokeniseJob, num_proc: int, content: Identity, alone: bool) -> DataReport:
    """Into a folder of its own, renamed when whole: a cache is complete or absent."""
    if alone:  # what a killed run left behind
        for left in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
    temporary.mkdir()
    try:
        began = time.monotonic()
        report = tokenise_file(job, temporary, num_proc, content.lines or None)
        content.unchanged.check()
        report.seconds = round(time.monotonic() - began, 2)
        files = sealed.records(temporary)
        (temporary / REPORT).write_text(json.dumps({"files": files, "report": report.to_dict()}), encoding="utf-8")
        sealed.sync(temporary / REPORT)
        if folder.exists() and _opened(folder, job) is None:
            sealed.clear(folder, [*files, REPORT, OFFSETS, ROWS, FORMS, PAIR_PARTS])  # the same job's, damaged
        try:
            sealed.publish(temporary, folder)
        except OSError:
            if _opened(folder, job) is None:  # not because another process published the same
                raise
        return report
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _list_bad_rows(folder: Path, report: DataReport, to: Path, append: bool) -> None:
    if not report.bad:
        if not append:
            OwnedFiles(to.parent).remove(to.name)
        return
    own(to)
    if not append:
        to.unlink(missing_ok=True)
    with open(folder / BAD_ROWS, encoding="utf-8") as stored, open(to, "a", encoding="utf-8") as out:
        for line in stored:
            out.write(json.dumps({"file": report.file, **json.loads(line)}, ensure_ascii=False) + "\n")
    settle(to)
