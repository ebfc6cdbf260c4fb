"""Dataset formats: their tables, which format a file has, and its rows as conversations, pairs or problems.

Called by token_cache.py and tokenise.py (`rows` in one process, `parse` and `parse_pair` in its workers), by the stages
with rows of their own, and by `erniekit data`.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from erniekit.data.formats.columns import Columns, only_mapped
from erniekit.data.formats.detection import Detected, guessed
from erniekit.data.formats.fields import BadRow, is_preference, refuse_media, require
from erniekit.data.formats.files import MAX_ROW_BYTES, TOO_MANY_DIGITS, Raw, decode, rows
from erniekit.data.formats.returned import unlike
from erniekit.data.formats.tables import NOT_UTF8, is_table
from erniekit.data.formats.undetected import NotJson, undetected
from erniekit.data.preference import Preference
from erniekit.data.types import Conversation, RowProblem
from erniekit.errors import DataError
from erniekit.files.json_file import RepeatedKey
from erniekit.printable import plain
from erniekit.registry import Registry, nearest

__all__ = [
    "CLASS_FORMATS",
    "FORMATS",
    "MAX_ROW_BYTES",
    "PREFERENCE_FORMATS",
    "UNPAIRED_FORMATS",
    "Detected",
    "Raw",
    "check_columns",
    "detect",
    "no_rows",
    "parse",
    "parse_pair",
    "parsed",
    "read",
    "reader_of",
    "rows",
    "sole_format",
]

T = TypeVar("T")

# A format is `conversations(row, compat) -> list[Conversation]`; it raises BadRow for a row it cannot use. An installed
# package adds one by an entry point of this group.
FORMATS = Registry(
    "dataset type",
    {
        "erniekit": "erniekit.data.formats.erniekit:conversations",
        "alpaca": "erniekit.data.formats.alpaca:conversations",
        "messages": "erniekit.data.formats.messages:conversations",
        "chatml": "erniekit.data.formats.chatml:conversations",
        "sharegpt": "erniekit.data.formats.sharegpt:conversations",
        "prompt_completion": "erniekit.data.formats.prompt_completion:conversations",
    },
    group="erniekit.formats",
)
# For rows with two answers to compare: `preference(row, compat) -> Preference`, with a group of its own.
PREFERENCE_FORMATS = Registry(
    "dataset type",
    {
        "erniekit": "erniekit.data.formats.erniekit:preference",
        "alpaca": "erniekit.data.formats.alpaca:preference",
        "messages": "erniekit.data.formats.messages:preference",
        "chatml": "erniekit.data.formats.messages:preference",
        "sharegpt": "erniekit.data.formats.sharegpt:preference",
        "prompt_completion": "erniekit.data.formats.prompt_completion:preference",
    },
    group="erniekit.preference_formats",
)
# For rows of stage KTO: `unpaired(row) -> list[Unpaired]`; and of stage CLS: `class_row(row) -> ClassRow`. One reader
# each takes rows of every form that is detected.
UNPAIRED_FORMATS = Registry(
    "dataset type of stage KTO",
    {"unpaired": "erniekit.data.formats.unpaired:unpaired"},
    group="erniekit.unpaired_formats",
)
CLASS_FORMATS = Registry(
    "dataset type of stage CLS",
    {"classes": "erniekit.data.classification:read_row"},
    group="erniekit.class_formats",
)
_LOOK_AT = 50  # rows


@functools.cache
def reader_of(table: Registry, format: str, gives: type, several: bool = False) -> Callable[..., Any]:
    """Gives one of a class of rows, or several. A package's reader is another program: whatever it raises or gives
    instead is the problem of a row, which is counted and shown."""
    reader, package = table.get(format), table.distribution(format)
    if not package:
        return reader  # type: ignore[no-any-return]

    def read(*row: Any) -> Any:
        try:
            found = reader(*row)
        except BadRow:
            raise
        except (Exception, SystemExit) as error:  # which would end the command without a word
            raise BadRow("reader_failed", f"{format} of {package}: {type(error).__name__}: {error}"[:300]) from error
        if problem := unlike(found, gives, several):
            raise BadRow("reader_failed", f"{format} of {package}: {problem}"[:300])
        return found

    return read


def sole_format(table: Registry, format: str | None) -> str:
    """The name in a table whose own reader takes every form that FORMATS knows: that reader's, or a package's."""
    name = next(iter(table)) if format is None or format in FORMATS else format
    table.get(name)  # an unknown name is said before the file is read
    return name


def parse(
    raw: Raw, line_no: int, path: str | Path, format: str, compat: bool = False, columns: Columns = ()
) -> list[Conversation] | RowProblem:
    """One raw row as its training conversations (several for tool rows). Depends on nothing but its arguments."""

    def conversations(row: Any) -> list[Conversation]:
        if isinstance(row, dict) and is_preference(row):
            raise BadRow("preference", "the row holds two answers to compare: preference data needs `stage: DPO`")
        if isinstance(row, dict) and not compat:
            refuse_media(row)
        found: list[Conversation] = reader_of(FORMATS, format, Conversation, True)(row, compat)
        return found

    return parsed(raw, line_no, path, conversations, columns)


def parse_pair(
    raw: Raw, line_no: int, path: str | Path, format: str, compat: bool = False, columns: Columns = ()
) -> Preference | RowProblem:
    """One raw row as the pair of answers it compares. Depends on nothing but its arguments."""

    def pair(row: Any) -> Preference:
        if isinstance(row, dict) and not is_preference(row) and not PREFERENCE_FORMATS.distribution(format):
            require(row, *(("response", "sort") if format == "erniekit" else ("chosen", "rejected")))
        if isinstance(row, dict) and not compat:
            refuse_media(row)
        found: Preference = reader_of(PREFERENCE_FORMATS, format, Preference)(row, compat)
        return found

    return parsed(raw, line_no, path, pair, columns)


def parsed(raw: Raw, line_no: int, path: str | Path, read: Callable[[Any], T], columns: Columns = ()) -> T | RowProblem:
    """What `read` makes of the decoded row; its BadRow, and whatever cannot be decoded, as a problem of that line."""
    if isinstance(raw, RowProblem):
        return raw
    try:
        return read(decode(raw, columns))
    except BadRow as bad:
        return RowProblem(str(path), line_no, bad.kind, bad.reason)
    except UnicodeDecodeError as error:
        return RowProblem(str(path), line_no, NOT_UTF8, f"byte {error.start + 1} is not UTF-8; save it as UTF-8")
    except json.JSONDecodeError as error:
        return RowProblem(str(path), line_no, "bad_json", f"not JSON: {error.msg} (column {error.colno})")
    except RepeatedKey as error:
        return RowProblem(str(path), line_no, "repeated_key", str(error))
    except ValueError:  # a number of more digits than Python converts
        return RowProblem(str(path), line_no, "bad_json", TOO_MANY_DIGITS)
    except RecursionError:
        return RowProblem(str(path), line_no, "deep_nesting", "the row is nested too deeply")


def read(
    path: str | Path, format: str, compat: bool = False, columns: Columns = ()
) -> Iterator[tuple[int, Conversation | RowProblem]]:
    FORMATS.get(format)  # an unknown name is said before the file is opened
    for line_no, raw in rows(path):
        found = parse(raw, line_no, path, format, compat, columns)
        if isinstance(found, RowProblem):
            yield line_no, found
        else:
            for conversation in found:
                yield line_no, conversation


def detect(path: str | Path, vision: bool = False, columns: Columns = ()) -> Detected:
    """The format of the first rows, by their fields. DataError when they fit none. vision: rows may hold pictures.
    columns: which of the file's are which fields; they alone decide if they make up a format."""
    seen: Counter[tuple[str, bool]] = Counter()
    found: dict[tuple[str, bool], Detected] = {}
    first: Any = None
    broken: NotJson | None = None
    example, count, foreign = "", 0, 0
    if columns:
        check_columns(path, columns)
    for line, raw in islice(rows(path), _LOOK_AT):
        count += 1
        if isinstance(raw, RowProblem):
            example = example or raw.reason
            continue
        try:
            row = decode(raw, columns)
        except RepeatedKey as error:
            example = example or str(error)
            continue
        except UnicodeDecodeError:
            foreign += 1
            continue
        except (ValueError, RecursionError) as error:
            foreign += isinstance(raw, bytes) and b"\0" in raw  # UTF-16 without a mark at its beginning
            foreign += isinstance(error, BadRow) and error.kind == NOT_UTF8
            if isinstance(raw, bytes) and isinstance(error, json.JSONDecodeError):
                broken = broken or NotJson(line, raw.decode("utf-8"), f"{error.msg} (column {error.colno})")
            continue
        guess = guessed(only_mapped(row, columns), vision) or guessed(row, vision)
        if guess:
            seen[guess.format, guess.preference] += 1
            before = found.get((guess.format, guess.preference))
            found[guess.format, guess.preference] = before if before and before.vision else guess
        elif first is None:
            first = row
    if not count or is_empty(path):
        raise no_rows(path)
    if not seen and foreign:
        fix = "save it as UTF-8" + ("" if is_table(str(path)) else ", one JSON object per line")
        raise DataError("dataset is not UTF-8 text", where=str(path), fix=fix)
    if not seen:
        raise undetected(path, first, example, FORMATS, broken)
    # Rows with tools are rare in a file of tool data, and only the chatml reader knows them.
    tools = ("chatml", False)
    alone = tools in seen and not seen.keys() - {tools, ("messages", False)}
    seeing = [kind for kind, _ in seen.most_common() if found[kind].vision]
    return found[seeing[0] if seeing else tools if alone else seen.most_common(1)[0][0]]


def is_empty(path: str | Path) -> bool:
    place = Path(path)
    return place.is_file() and not place.stat().st_size


def no_rows(path: str | Path) -> DataError:
    if is_empty(path):
        fix = "write rows into it, or leave it out"
        return DataError("the dataset file is empty, 0 bytes", where=str(path), fix=fix)
    if is_table(str(path)):
        return DataError("the table has no rows below its header", where=str(path), fix="each line below is a row")
    return DataError(
        "dataset holds no rows",
        where=str(path),
        fix="one JSON object per line is expected, in a .json an array of them too",
    )


def check_columns(path: str | Path, columns: Columns) -> None:
    """DataError if the first rows have no column of a name that `columns` gives."""
    seen: dict[str, None] = {}
    for _, raw in islice(rows(path), _LOOK_AT):
        try:
            row = decode(raw)
        except (ValueError, RecursionError):
            continue
        seen.update(dict.fromkeys(map(str, row)) if isinstance(row, dict) else {})
    for field, column in columns:
        if seen and column not in seen:
            near = nearest(column, list(seen))
            raise DataError(
                f"no column `{plain(column, 60)}`; the first rows have {', '.join(plain(name, 60) for name in seen)}",
                where=f"columns: {field}: {plain(column, 60)} ({path})",
                fix=f"did you mean {plain(near[0], 60)}?" if near else "name one of these columns",
            )
