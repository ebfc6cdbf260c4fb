"""Rows of .csv and .tsv files: the separator is found in the header, cells keep their white space, empty ones are null.

Called by files.py with a stream of UTF-8.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from erniekit import heartbeat
from erniekit.data.formats.fields import BadRow
from erniekit.data.thinking import FIELDS
from erniekit.data.types import UNREADABLE, RowProblem
from erniekit.errors import DataError
from erniekit.printable import counted

_SEPARATORS = (",", "\t", ";", "|")
_HEAD = 1 << 16
_ESCAPED, _DOUBLED = re.compile(r'\\"(?!")'), re.compile(r'[^,;|\t\r\n"]""|""[^,;|\t\r\n"]')
# Fields that are a number or a flag in other files, and those that are a list there.
_NUMBERS = ("label", "is_system", "score_delta")
_LISTS = ("src", "tgt", "response", "sort", "label", "tool_calls")
_BYTES = re.compile(r"[\udc80-\udcff]")  # as surrogateescape keeps them
NOT_UTF8 = "bad_utf8"  # the kind of such a row
_TRUTH = {"true": True, "false": False}


class TableRow(dict[str, Any]):
    """A row whose cells are all text."""


def is_table(name: str) -> bool:
    return name.lower().removesuffix(".gz").endswith((".csv", ".tsv"))


def table_rows(
    stream: Any, path: str, name: str, limit: int, most_blank: int
) -> Iterator[tuple[int, TableRow | RowProblem]]:
    """Each row with the line it begins on. limit: of a row; most_blank: empty lines in a row."""
    head = stream.peek(_HEAD)[:_HEAD].decode("utf-8-sig", "replace")
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(limit)
    lines = _BoundedLines(text, limit)
    reader = csv.reader(lines, strict=True, **dialect(head, name))
    names: list[str] = []
    blank = 0
    while True:
        line = reader.line_num + 1
        try:
            lines.left = limit
            cells = next(reader)
        except StopIteration:
            return
        except _RowTooLong:
            reason = f"the row has more than {limit / 2**20:.0f} MiB; the rest of the file is not read"
            yield line, RowProblem(path, line, UNREADABLE, reason)
            return
        except csv.Error as error:
            # Where a quote is missing, what follows cannot be divided into rows.
            yield line, RowProblem(path, line, UNREADABLE, f"not CSV: {error}; the rest of the file is not read")
            return
        heartbeat.beat()
        if not cells:
            if (blank := blank + 1) > most_blank:
                yield line, RowProblem(path, line, UNREADABLE, f"{blank:,} empty lines; the rest is not read")
                return
            continue
        blank = 0
        if not names:
            names = _header(cells, path)
        elif len(cells) != len(names):
            reason = f"the row has {counted(len(cells), 'cell')}, the header has {counted(len(names), 'column')}"
            yield line, RowProblem(path, line, "columns", reason)
        else:
            yield line, TableRow((column, cell or None) for column, cell in zip(names, cells))


class _RowTooLong(Exception):
    pass


class _BoundedLines:
    """Lines of text, of which one row takes `left` characters at most: the reader of rows bounds only its cells."""

    def __init__(self, text: io.TextIOWrapper, left: int) -> None:
        self._text, self.left = text, left

    def __iter__(self) -> _BoundedLines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise _RowTooLong
        if not line:
            raise StopIteration
        return line


def dialect(head: str, name: str) -> dict[str, Any]:
    """Of the header, the separator that gives most columns; a backslash before quotes if no quote is doubled."""
    escaped = bool(_ESCAPED.search(head)) and not _DOUBLED.search(head)
    more: dict[str, Any] = {"escapechar": "\\", "doublequote": False} if escaped else {}
    if name.lower().removesuffix(".gz").endswith(".tsv"):
        return {"delimiter": "\t", **more}
    first = next((line for line in head.splitlines() if line.strip()), "")
    columns = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in _SEPARATORS}
    return {"delimiter": max(_SEPARATORS, key=lambda mark: columns[mark]), **more}


def _header(cells: list[str], path: str) -> list[str]:
    names = [cell.strip() or f"(column {number})" for number, cell in enumerate(cells, 1)]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError(f"{count} columns are called `{name[:60]}`", where=f"{path}:1", fix="rename all but one")
    return names


def typed(row: TableRow) -> dict[str, Any]:
    """Cells as the fields of that name are elsewhere: numbers, flags, lists."""
    out = dict(row)
    for field, cell in out.items():
        if isinstance(cell, str) and not cell.isascii() and _BYTES.search(cell):
            raise BadRow(NOT_UTF8, f"`{field}` holds bytes that are not UTF-8; save the table as UTF-8")
    for field in (*_LISTS, *FIELDS):
        cell = out.get(field)
        if isinstance(cell, str) and cell.lstrip().startswith("["):
            try:
                found = json.loads(cell)
            except ValueError:
                continue  # text that begins with a bracket
            if field in _LISTS or all(one is None or isinstance(one, str) for one in found):  # a thought may be [1, 2]
                out[field] = found
    for field in _NUMBERS:
        cell = out.get(field)
        if isinstance(cell, str):
            out[field] = _TRUTH.get(cell.strip().lower(), _number(cell))
    return out


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
