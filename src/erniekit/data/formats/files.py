"""Open a dataset file of any kind and give its rows one by one, in memory that does not grow with the file.

Called by the formats package (and through it by the token cache). A row that cannot be read is a Problem, not a stop.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from erniekit import heartbeat
from erniekit.data.formats.columns import Columns, renamed
from erniekit.data.formats.encodings import TextEncoding, as_utf8
from erniekit.data.formats.tables import TableRow, is_table, table_rows, typed
from erniekit.data.storage import HubDataset, located
from erniekit.data.types import UNREADABLE, RowProblem
from erniekit.errors import DataError
from erniekit.extras import install_command
from erniekit.files.json_file import RepeatedKey, unique_keys

Raw = bytes | dict[str, Any] | list[Any] | RowProblem
MAX_ROW_BYTES = 64 << 20
MAX_SKIPPED_BYTES = 1 << 30  # of one row that is too long: what goes on further is no dataset
MAX_SKIPPED_MARKS = 500_000  # runs of brackets, and quotes, of one array row that is skipped: about a second
MAX_BLANK_LINES = 100_000  # in a row
MAX_EXPANSION, EXPANDS_FROM = 200, 256 << 20  # text of a .gz to its size on disk, once there is so much text
_CHUNK = 1 << 20
_BOM = codecs.BOM_UTF8
_BLANK = b" \t\r\n"
TOO_MANY_DIGITS = "a number of it has more digits than are read"


def rows(path: str | Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[tuple[int, Raw]]:
    """(number, raw row): lines of JSONL as bytes, elements of an array and rows of tables as objects; 1-based."""
    stored = located(path)
    if isinstance(stored, HubDataset):
        yield from stored.rows()
        return
    with stored.open() as file:
        magic = _magic(file, str(path))
        if magic == b"PAR1" or stored.name.lower().endswith(".parquet"):
            yield from _parquet(file, str(path))
        elif magic[:2] == b"\x1f\x8b":
            with Unpacked(file, stored.size()) as stream:
                yield from _text_rows(stream, str(path), stored.name, max_row_bytes)
        else:
            yield from _text_rows(file, str(path), stored.name, max_row_bytes)


class RowPlace(NamedTuple):
    """Behind a row: where reading can go on without the rows before it."""

    offset: int  # bytes
    row: int  # number of the row


def placed_rows(path: str | Path, after: RowPlace | None = None) -> Iterator[tuple[int, Raw, RowPlace | None]]:
    """As `rows`, each with the place behind it: of lines of UTF-8, not of tables, arrays and packed files. after: go on
    there, which `can_go_on` has looked at."""
    stored = located(path)
    last = 0 if after is None else after.row
    if not isinstance(stored, HubDataset):
        try:
            with stored.open() as file:
                if _is_lines(file, str(path), stored.name):
                    if after is not None:
                        file.seek(after.offset)
                    for number, raw in _lines(file, str(path), MAX_ROW_BYTES, last):
                        last = number
                        yield number, raw, RowPlace(file.tell(), number)
                    return
        except (OSError, EOFError) as error:
            problem = RowProblem(str(path), last + 1, UNREADABLE, f"the file cannot be read further: {error}")
            yield last + 1, problem, None
            return
    assert after is None, "places are given for lines alone"
    for number, raw in rows(path):
        yield number, raw, None


def can_go_on(path: str | Path, after: RowPlace) -> bool:
    """Whether a part of the file can be asked for, and a line ends before the place."""
    stored = located(path)
    if isinstance(stored, HubDataset):
        return False
    try:
        with stored.open() as file:
            file.seek(after.offset - 1)
            return file.read(1) == b"\n"
    except OSError:
        return False


def _is_lines(file: io.BufferedReader, path: str, name: str) -> bool:
    _magic(file, path)
    head = file.peek(_CHUNK)[:_CHUNK]
    if head[:4] == b"PAR1" or name.lower().endswith(".parquet") or head[:2] == b"\x1f\x8b" or is_table(name):
        return False
    return as_utf8(file, path)[0] is file and not _is_array(head.removeprefix(_BOM).lstrip(), name)


def file_encoding(path: str | Path) -> TextEncoding:
    """Of a text file, as its rows are read; UTF-8 for others."""
    stored = located(path)
    if isinstance(stored, HubDataset):
        return TextEncoding()
    with stored.open() as file:
        magic = _magic(file, str(path))
        if magic == b"PAR1" or stored.name.lower().endswith(".parquet"):
            return TextEncoding()
        try:
            stream = Unpacked(file, stored.size()) if magic[:2] == b"\x1f\x8b" else file
            return as_utf8(stream, str(path))[1]
        except (OSError, EOFError, zlib.error):  # reading the rows reports it
            return TextEncoding()


def _magic(file: io.BufferedReader, path: str) -> bytes:
    try:
        return file.peek(4)[:4]
    except OSError as error:  # a server that answers, and then does not
        raise DataError(f"dataset cannot be read: {error}", where=path) from error


class Unpacked(gzip.GzipFile):
    """The text of a .gz; an archive that unpacks to hundreds of times its size is refused as damaged."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._limit = max(EXPANDS_FROM, MAX_EXPANSION * size)
        self._since = 0  # bytes since the position was last compared with the limit: reading it at each line is slow

    def _counted(self, data: bytes) -> bytes:
        self._since += len(data)
        if self._since >= _CHUNK:
            self._since = 0
            heartbeat.beat()
            if self.tell() > self._limit:
                raise OSError(f"it unpacks to more than {MAX_EXPANSION} times its size: made to fill a memory")
        return data

    def read(self, size: int | None = -1) -> bytes:
        return self._counted(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        return self._counted(super().readline(-1 if size is None else size))


def decode(raw: Raw, columns: Columns = ()) -> Any:
    """The JSON value of a raw row, its columns renamed. Raises ValueError, or RecursionError for absurd nesting."""
    row = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys) if isinstance(raw, bytes) else raw
    if columns and isinstance(row, dict):
        row = renamed(row, columns)
    return typed(row) if isinstance(row, TableRow) else row


def _text_rows(stream: Any, path: str, name: str, limit: int) -> Iterator[tuple[int, Raw]]:
    number = 0
    try:
        stream, _ = as_utf8(stream, path)
        if is_table(name):
            found: Iterator[tuple[int, Raw]] = table_rows(stream, path, name, limit, MAX_BLANK_LINES)
        else:
            head = stream.peek(_CHUNK).removeprefix(_BOM).lstrip()
            found = (_array if _is_array(head, name) else _lines)(stream, path, limit)
        for number, raw in found:
            yield number, raw
    except (OSError, EOFError, zlib.error) as error:
        yield number + 1, RowProblem(path, number + 1, UNREADABLE, f"the file cannot be read further: {error}")


def is_array_by_name(name: str) -> bool:
    """A file of this name that begins with a list is an array of rows, also where it is one line."""
    return name.lower().removesuffix(".gz").endswith(".json")


def _is_array(head: bytes, name: str) -> bool:
    """A JSON array of rows; in .jsonl a line may itself be a list, so there the array must span lines."""
    if not head.startswith(b"["):
        return False
    if is_array_by_name(name):
        return True
    first = head.partition(b"\n")[0].rstrip()
    return first == b"[" or first[-1:] in (b",", b"{")


def _lines(stream: IO[bytes], path: str, limit: int, number: int = 0) -> Iterator[tuple[int, Raw]]:
    """number: of the lines before."""
    blank = 0
    while line := stream.readline(limit + 2):
        number += 1
        if len(line) > limit and not line.endswith(b"\n"):
            size, ended = skip_line(stream, len(line))
            yield number, _too_big(path, number, size, limit, ended)
            if not ended:
                return
            continue
        if line := without_mark(line):
            blank = 0
            yield number, line
        elif (blank := blank + 1) > MAX_BLANK_LINES:
            yield number, RowProblem(path, number, UNREADABLE, f"{blank:,} empty lines; the rest is not read")
            return


def without_mark(line: bytes) -> bytes:
    """A line of JSONL without white space around it and byte order marks before it: where files were joined, the first
    line of each has one."""
    line = line.strip(_BLANK)
    while line.startswith(_BOM):
        line = line[len(_BOM) :].lstrip(_BLANK)
    return line


def skip_line(stream: IO[bytes], size: int) -> tuple[int, bool]:
    """To the end of a line of which `size` bytes are read: its size, and whether it ended within the bound."""
    while size <= MAX_SKIPPED_BYTES:
        line = stream.readline(_CHUNK)
        size += len(line)
        heartbeat.beat()
        if not line or line.endswith(b"\n"):
            return size, True
    return size, False


def _too_big(path: str, number: int, size: int, limit: int, ended: bool = True) -> RowProblem:
    reason = f"the row has {size / 2**20:.0f} MiB or more; the limit is {limit / 2**20:.0f} MiB"
    if not ended:
        return RowProblem(path, number, UNREADABLE, f"{reason}; the rest of the file is not read")
    return RowProblem(path, number, "row_too_long", reason)


def _parquet(stored: IO[bytes], path: str) -> Iterator[tuple[int, Raw]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError("reading .parquet needs pyarrow", where=path, fix=install_command("parquet")) from error
    number = 0
    try:
        with parquet.ParquetFile(stored) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        yield number + 1, RowProblem(path, number + 1, UNREADABLE, f"not a readable parquet file: {error}")


class _Window:
    """The part of a text stream in view: `text` from `at` on. `more` doubles it; consumed text is freed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        # Bytes that are not UTF-8 become lone surrogates, which the field checks report for the row they are in.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.at, self.ended = "", 0, False

    def more(self) -> bool:
        self.text, self.at = self.text[self.at :], 0
        data = self._stream.read(max(_CHUNK, len(self.text)))
        self.text += self._decoder.decode(data, final=not data)
        self.ended = not data
        return bool(data)

    def next_char(self, wanted: re.Pattern[str]) -> str:
        """The next character that `wanted` finds, not yet consumed; empty at the end."""
        while True:
            if (found := wanted.search(self.text, self.at)) is not None:
                self.at = found.start()
                return found.group()
            self.at = len(self.text)
            heartbeat.beat()
            if not self.more():
                return ""


_BEGIN = re.compile("[^ \t\r\n\ufeff]")
_TEXT = re.compile(r"[^ \t\r\n]")
_NEXT = re.compile(r"[^ \t\r\n,]")
_STRUCTURE = re.compile(r'["},\]]|[{\[]+')
_INSIDE = re.compile(r'"|[{\[]+|[}\]]+')
_IN_STRING = re.compile(r'["\\]')
_scan_once = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode


def _array(stream: IO[bytes], path: str, limit: int) -> Iterator[tuple[int, Raw]]:
    window = _Window(stream)
    window.next_char(_BEGIN)
    window.at += 1  # the opening bracket
    number = 0
    while True:
        char = window.next_char(_NEXT)
        if char == "]":
            window.at += 1
            if window.next_char(_TEXT):
                reason = "text follows the end of the array; rows after a damaged one may be lost"
                yield number + 1, RowProblem(path, number + 1, UNREADABLE, reason)
            return
        number += 1
        if not char:
            yield number, RowProblem(path, number, UNREADABLE, "the file ends before the array does")
            return
        value = _element(window, path, number, limit)
        if isinstance(value, RowProblem) and not _skip_element(window):
            yield number, replace(value, kind=UNREADABLE, reason=f"{value.reason}; the rest of the file is not read")
            return
        yield number, value


def _element(window: _Window, path: str, number: int, limit: int) -> Any:
    """The next value, consumed; or a Problem, with the window still at its start."""
    while True:
        try:
            value, end = _scan_once(window.text, window.at)
            if end < len(window.text) or window.ended:
                window.at = end
                kinds = (dict, list)
                return value if isinstance(value, kinds) else RowProblem(path, number, "not_an_object", _SCALAR)
        except json.JSONDecodeError as error:
            # Cut off by the window, or truly wrong? Errors of the first kind are at its end, or in an open string.
            at_end = error.pos >= len(window.text) - 16 or error.msg.startswith("Unterminated string")
            if window.ended or not at_end:
                return RowProblem(path, number, "bad_json", f"row {number} of the array is not JSON: {error.msg}")
        except RecursionError:
            return RowProblem(path, number, "deep_nesting", "the row is nested too deeply")
        except RepeatedKey as error:
            return RowProblem(path, number, "repeated_key", str(error))
        except ValueError:  # a number of more digits than Python converts
            return RowProblem(path, number, "bad_json", f"row {number} of the array: {TOO_MANY_DIGITS}")
        if len(window.text) - window.at > limit:
            return _too_big(path, number, len(window.text) - window.at, limit)
        window.more()


_SCALAR = "a row must be an object, not a single value"


def _skip_element(window: _Window) -> bool:
    """Step over a value that does not parse, by its brackets only. False when the file ends first, or when it goes on
    for more than a row may."""
    depth, in_string, marks, size = 0, False, 0, 0
    while marks < MAX_SKIPPED_MARKS and size < MAX_SKIPPED_BYTES:
        marks += 1
        found = (_IN_STRING if in_string else _INSIDE if depth else _STRUCTURE).search(window.text, window.at)
        if not found:
            size += len(window.text) - window.at
            window.at = len(window.text)
            if not window.more():
                return False
            heartbeat.beat()
            continue
        run, window.at = found.group(), found.end()
        if run == "\\":
            if window.at == len(window.text):
                window.more()
            window.at += 1
        elif run == '"':
            in_string = not in_string
        elif run[0] in "{[":
            depth += len(run)
        elif depth == 0 and run != "}":  # the comma or bracket behind a bare word; a lone brace is part of the damage
            window.at = found.start()
            return True
        elif 0 < depth <= len(run):
            window.at = found.start() + depth
            return True
        elif depth:
            depth -= len(run)
    return False
