"""`erniekit data clean FILE... --output NEW.jsonl`: a copy of the rows without those that the flags exclude.

Called by the command table. Writes new files alone; every row that is left out is listed with file, line and reason.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from erniekit.data.formats import Raw
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.files import decode
from erniekit.data.inspect import as_flags, columns_given
from erniekit.data.overlap import OverlapIndex
from erniekit.data.quality import Read, is_near_empty, row_key
from erniekit.data.stage_rows import STAGES, StageRows, stage_rows
from erniekit.data.storage import listed_files
from erniekit.data.text_rows import PlainText
from erniekit.data.types import UNREADABLE, RowProblem
from erniekit.errors import ConfigError, DataError
from erniekit.files.unwritable import way_out
from erniekit.flag_parser import FlagParser
from erniekit.log import emit, paint, warn
from erniekit.printable import counted, public
from erniekit.progress import WorkProgress

_SHOWN = 50  # rows printed; all are in the list beside the copy


def clean_command(args: list[str]) -> int:
    given = clean_parser().parse_args(as_flags(args, ("stage", "columns"), "erniekit data clean"))
    if not (given.dedup or given.against or given.near_empty or given.drop_bad):
        raise ConfigError(
            "nothing to clean was asked for",
            where="erniekit data clean",
            fix="one or several of --dedup, --near-empty, --drop-bad, --against EVAL",
        )
    if given.ngram < 4:
        raise ConfigError(f"--ngram is {given.ngram}", where="erniekit data clean", fix="4 words or more; 13 is usual")
    output = Path(given.output).expanduser()
    if not output.name.endswith(".jsonl"):
        raise ConfigError(f"{output.name} does not end in .jsonl", where="--output", fix="the copy is JSONL: NEW.jsonl")
    removed = output.with_name(f"{output.name.removesuffix('.jsonl')}.removed.jsonl")
    for path in (output, removed):
        if os.path.lexists(path):
            raise DataError(f"{path.name} exists and is not replaced", where=str(path), fix="give another --output")
    _Cleaning(given, output, removed).run()
    return 0


def clean_parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="erniekit data clean",
        description="Copy rows into a new JSONL file without duplicates, bad rows or rows of an evaluation file.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="as for `erniekit data`: files, folders, patterns, URLs")
    add("--output", required=True, metavar="NEW.jsonl", help="must not exist yet")
    add("--dedup", action="store_true", help="keep the first of rows with the same content")
    add("--near-empty", action="store_true", help="leave out answers without a letter or digit, and N/A")
    add("--drop-bad", action="store_true", help="leave out rows that cannot be read; else they stop it")
    add("--against", action="append", default=[], metavar="EVAL", help="leave out rows that share words with this file")
    add("--ngram", type=int, default=13, metavar="N", help="length of an overlap, in words (13)")
    add("--stage", choices=STAGES, help="read rows as this stage does; else by their fields")
    add("--columns", action="append", metavar="FIELD=COLUMN,...", help="which column holds which field: prompt=q")
    return parser


class _Cleaning:
    def __init__(self, given: argparse.Namespace, output: Path, removed: Path) -> None:
        self.given, self.output, self.removed = given, output, removed
        self.columns: Columns = columns_given(given.columns)
        self.seen: dict[int, str] = {}
        self.against = OverlapIndex(given.ngram)
        self.reasons: Counter[str] = Counter()
        self.kept = 0

    def run(self) -> None:
        for name in self.given.against:
            for file in listed_files([name]):
                for where, _, found in self._read(file.path):
                    if not isinstance(found, RowProblem):
                        self.against.add(found, where)
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            # Under hidden names until they are whole: half a copy, as a kill leaves it, looks like a whole one.
            mark = secrets.token_hex(4)
            parts = {path: path.with_name(f".{path.name}.{mark}.part") for path in (self.removed, self.output)}
            try:
                with ExitStack() as stack:
                    listed, copy = (stack.enter_context(open(part, "x", encoding="utf-8")) for part in parts.values())
                    self._copy(copy, listed)
                for path, part in parts.items():
                    _publish(part, path)
            finally:
                for part in parts.values():
                    part.unlink(missing_ok=True)
        except FileExistsError as error:
            raise DataError(
                "a file of the copy's name appeared while it was made",
                where=str(self.output),
                fix="give another --output",
            ) from error
        except OSError as error:
            raise DataError(
                f"the copy cannot be written: {error.strerror or error}",
                where=str(self.output),
                fix=f"{way_out(error)}, or give another --output",
            ) from error
        self._tell()

    def _copy(self, copy: IO[str], listed: IO[str]) -> None:
        files = listed_files(self.given.files)
        self._refuse_mixture([file.path for file in files])
        for file in files:
            for where, raw, found in self._read(file.path):
                kind, reason = self._verdict(found, where)
                if not kind:
                    self.kept += 1
                    copy.write(_json_line(raw))
                    continue
                self.reasons[kind] += 1
                listed.write(json.dumps({"where": where, "kind": kind, "reason": reason}, ensure_ascii=False) + "\n")
                if self.reasons.total() <= _SHOWN:
                    emit(f"  {paint(where, 'yellow')}: {kind}: {reason}")

    def _refuse_mixture(self, paths: Sequence[str | Path]) -> None:
        """Rows of several formats in one file could not be read again: a file has one."""
        formats = {path: _format(self._stage_rows(path)) for path in paths}
        other = next((path for path in paths if formats[path] != formats[paths[0]]), None)
        if other is not None:
            raise DataError(
                f"{paths[0]} is {formats[paths[0]]} and {other} is {formats[other]}: one copy holds one format",
                where=str(other),
                fix="clean them one by one, each with its own --output",
            )

    def _read(self, path: str | Path) -> Iterator[tuple[str, Raw, Read | RowProblem]]:
        found = self._stage_rows(path)
        with WorkProgress(f"reading {Path(str(path)).name}", None, "rows") as progress:
            for line, raw in found.rows():
                yield f"{public(str(path))}:{line}", raw, found.read(raw, line)
                progress.add()

    def _stage_rows(self, path: str | Path) -> StageRows:
        return stage_rows(str(path), self.given.stage, columns=self.columns)

    def _verdict(self, found: Read | RowProblem, where: str) -> tuple[str, str]:
        """Why a row goes; two empty texts where it stays."""
        if isinstance(found, RowProblem):
            if found.kind == UNREADABLE:  # a copy without what is behind it would look like all of it
                fix = "get or write the file again, whole"
                raise DataError(f"the file cannot be read to its end: {found.reason}", where=where, fix=fix)
            if not self.given.drop_bad:
                raise DataError(f"bad row: {found.reason}", where=where, fix="fix it, or leave it out: --drop-bad")
            return "bad row", found.reason
        if self.given.near_empty and is_near_empty(found):
            return "near-empty", "an answer has no letter or digit, or is a placeholder"
        if self.given.against and (shared := self.against.find(found)) is not None:
            return "in the evaluation file", f"shares `{shared[0]}` with {shared[1]}"
        if self.given.dedup:
            key = row_key(found)
            if key in self.seen:
                return "duplicate", f"has the content of {self.seen[key]}"
            self.seen[key] = where
        return "", ""

    def _tell(self) -> None:
        if self.reasons.total() > _SHOWN:
            emit(f"  ... and {self.reasons.total() - _SHOWN:,} more")
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.reasons.most_common())
        left = f"{counted(self.reasons.total(), 'row')} left out ({kinds}; listed in {self.removed})"
        left = left if kinds else "none left out"
        emit(f"{paint(str(self.output), 'bold')}: {counted(self.kept, 'row')}; {left}")
        if not self.kept:
            warn(f"no row is left: {self.output} is empty")


def _publish(whole: Path, path: Path) -> None:
    """Under its name; FileExistsError if there is a file of that name."""
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(whole, "rb") as source, open(path, "xb") as target:
            shutil.copyfileobj(source, target)


def _format(found: StageRows) -> str:
    # chatml rows are messages rows with tools: one reader takes both
    name = "messages" if found.format == "chatml" else found.format
    return f"{name} preference data" if found.preference else name


def _json_line(raw: Raw) -> str:
    """The row as it was; a row that is no JSON text itself is written as such."""
    if isinstance(raw, PlainText):
        return json.dumps({"text": raw.decode("utf-8")}, ensure_ascii=False) + "\n"
    if isinstance(raw, bytes):
        return raw.decode("utf-8") + "\n"
    value = {name: cell for name, cell in decode(raw).items() if cell is not None} if isinstance(raw, dict) else raw
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"
