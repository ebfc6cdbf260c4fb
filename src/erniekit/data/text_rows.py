"""Documents of text files, one after the other, from any place on: what indexing reads, and where it resumes.

index.py reads them; a document is a line of JSONL, a row of .json, .parquet, .csv or .tsv, or a paragraph block of
.txt.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from erniekit.data.formats import files
from erniekit.data.formats.encodings import UTF8, as_utf8
from erniekit.data.formats.files import MAX_ROW_BYTES, Raw, Unpacked, rows, skip_line, without_mark
from erniekit.data.types import UNREADABLE, RowProblem
from erniekit.errors import DataError
from erniekit.files import refuse_special

_BUFFER = 1 << 20
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_LOST = 1 << 62  # the offset behind a damage that nothing can be read after


class PlainText(bytes):
    """A document that is text itself, not JSON around it."""


class Place(NamedTuple):
    """All before it has been read; a resume goes on here."""

    file: int = 0
    offset: int = 0  # bytes, of the unpacked text
    row: int = 0  # lines, or rows of .json and .parquet


class FoundDocument(NamedTuple):
    row: int  # where it begins
    raw: Raw
    after: Place
    read: int  # bytes of the file on disk that are done, as far as they are known


def documents(path: Path, place: Place) -> Iterator[FoundDocument]:
    """The documents of one file from `place` on."""
    if place.offset == _LOST:
        return
    refuse_special(path, DataError)
    kind = path.name.lower().removesuffix(".gz")
    try:
        size = path.stat().st_size
        disk = open(path, "rb", buffering=0)  # noqa: SIM115  closed by the block below
    except OSError as error:
        raise DataError(f"text cannot be read: {error.strerror}", where=str(path)) from error
    with disk:
        if path.is_dir() or kind.endswith((".json", ".parquet", ".csv", ".tsv")):
            for number, raw in islice(rows(path), place.row, None):
                yield FoundDocument(number, raw, place._replace(row=max(number, place.row)), 0)
            return
        packed = disk.read(2) == b"\x1f\x8b"
        disk.seek(0)
        stream: Any = io.BufferedReader(disk, _BUFFER)
        if packed:  # no buffer around it: a cut archive would take with it what was unpacked before the cut
            stream = Unpacked(stream, size)
        reader = _paragraphs if kind.endswith(".txt") else _lines
        number = place.row
        try:
            stream, encoding = as_utf8(stream, str(path))
            packed = packed or encoding.name != UTF8
            stream.seek(place.offset)  # packed: unpacks what comes before, which costs little compared to tokenising it
            for number, raw, line in reader(stream, path, place.row):
                offset = stream.tell()
                yield FoundDocument(number, raw, Place(place.file, offset, line), disk.tell() if packed else offset)
        except (OSError, EOFError, zlib.error) as error:
            problem = RowProblem(str(path), number + 1, UNREADABLE, f"the file cannot be read further: {error}")
            yield FoundDocument(number + 1, problem, Place(place.file, _LOST, number + 1), size)


def _line(stream: IO[bytes]) -> tuple[bytes, int]:
    """The next line and its size; empty bytes of a size above 0 when it is over the limit."""
    line = stream.readline(MAX_ROW_BYTES + 2)
    size = len(line)
    if size > MAX_ROW_BYTES and not line.endswith(b"\n"):
        size, ended = skip_line(stream, size)
        if not ended:
            raise OSError(f"the line has more than {size >> 20} MiB")
        return b"", size
    return line, size


def _lines(stream: IO[bytes], path: Path, number: int) -> Iterator[tuple[int, Raw, int]]:
    blank = 0
    while True:
        line, size = _line(stream)
        if not size:
            return
        number += 1
        if not line and size > MAX_ROW_BYTES:
            yield number, _too_long(path, number, size), number
        elif line := without_mark(line):
            blank = 0
            yield number, line, number
        else:
            blank = _one_more(blank)


def _paragraphs(stream: IO[bytes], path: Path, number: int) -> Iterator[tuple[int, Raw, int]]:
    """Lines up to a blank one, their breaks kept. One of more than the limit is cut there, at a line's end."""
    block: list[bytes] = []
    first = size = blank = 0
    while True:
        line, length = _line(stream)
        line = line if number else line.removeprefix(_BOM)
        number += 1
        if not line and length:
            yield number, _too_long(path, number, length), number
            continue
        ended = not line.strip(_BLANK)
        blank = _one_more(blank) if ended and length else 0
        if not ended:
            first = first if block else number
            block.append(line)
            size += length
        if block and (ended or size > MAX_ROW_BYTES):
            yield first, PlainText(b"".join(block).rstrip(_BLANK)), number
            block, size = [], 0
        if not length:
            return


def _one_more(blank: int) -> int:
    if blank >= files.MAX_BLANK_LINES:
        raise OSError(f"{blank:,} empty lines follow each other")
    return blank + 1


def _too_long(path: Path, number: int, size: int) -> RowProblem:
    limit = MAX_ROW_BYTES >> 20
    return RowProblem(str(path), number, "row_too_long", f"the line has {size >> 20} MiB; the limit is {limit} MiB")
