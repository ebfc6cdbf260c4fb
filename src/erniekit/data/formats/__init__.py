"""Dataset formats: the FORMATS table, which format a file has, and its rows as conversations or problems.

Called by the token cache (`rows` in one process, `parse` in its workers), by doctor and by `erniekit data`.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from erniekit.data.formats.fields import BadRow, is_preference
from erniekit.data.formats.files import MAX_ROW_BYTES, Raw, decode, rows
from erniekit.data.types import Conversation, Problem
from erniekit.errors import DataError
from erniekit.registry import Registry

__all__ = ["FORMATS", "MAX_ROW_BYTES", "Detected", "Raw", "detect", "parse", "read", "rows"]

# A format is `conversations(row, compat) -> list[Conversation]`; it raises BadRow for a row it cannot use.
FORMATS = Registry(
    "dataset type",
    {
        "erniekit": "erniekit.data.formats.erniekit:conversations",
        "alpaca": "erniekit.data.formats.alpaca:conversations",
        "messages": "erniekit.data.formats.messages:conversations",
        "chatml": "erniekit.data.formats.chatml:conversations",
    },
)
PREFERENCE = "preference"  # what detect() calls rows with two answers to compare
_LOOK_AT = 50  # rows
_ELSEWHERE = {
    "text_info": "image and video rows; they need stage VL-SFT",
    "conversations": "ShareGPT rows; rename `conversations` to `messages`, from/value to role/content",
    "text": "plain text; it needs stage PT",
}


@dataclass(frozen=True)
class Detected:
    format: str  # a name in FORMATS, or "preference"
    why: str


@functools.cache
def _reader(format: str) -> Callable[[Any, bool], list[Conversation]]:
    return FORMATS.get(format)


def parse(raw: Raw, line_no: int, path: str | Path, format: str, compat: bool = False) -> list[Conversation] | Problem:
    """One raw row as its training conversations (several for tool rows). Depends on nothing but its arguments."""
    if isinstance(raw, Problem):
        return raw
    try:
        row = decode(raw)
        if isinstance(row, dict) and is_preference(row):
            raise BadRow("preference", "the row holds two answers to compare: preference data needs `stage: DPO`")
        return _reader(format)(row, compat)
    except BadRow as bad:
        return Problem(str(path), line_no, bad.kind, bad.reason)
    except UnicodeDecodeError as error:
        utf16 = isinstance(raw, bytes) and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "; the file looks like UTF-16, save it as UTF-8" if utf16 else ""
        return Problem(str(path), line_no, "bad_utf8", f"byte {error.start + 1} is not UTF-8{hint}")
    except json.JSONDecodeError as error:
        return Problem(str(path), line_no, "bad_json", f"not JSON: {error.msg} (column {error.colno})")
    except ValueError as error:  # a number of more digits than Python converts
        return Problem(str(path), line_no, "bad_json", f"not usable: {error}")
    except RecursionError:
        return Problem(str(path), line_no, "deep_nesting", "the row is nested too deeply")


def read(path: str | Path, format: str, compat: bool = False) -> Iterator[tuple[int, Conversation | Problem]]:
    _reader(format)  # an unknown name is said before the file is opened
    for line_no, raw in rows(path):
        found = parse(raw, line_no, path, format, compat)
        if isinstance(found, Problem):
            yield line_no, found
        else:
            for conversation in found:
                yield line_no, conversation


def detect(path: str | Path) -> Detected:
    """The format of the first rows, by their fields. DataError when they fit none."""
    seen: Counter[str] = Counter()
    why: dict[str, str] = {}
    example, count = "", 0
    for _, raw in islice(rows(path), _LOOK_AT):
        count += 1
        if isinstance(raw, Problem):
            example = example or raw.reason
            continue
        try:
            row = decode(raw)
        except (ValueError, RecursionError):
            continue
        guess = _guess(row)
        if guess:
            seen[guess.format] += 1
            why[guess.format] = guess.why
        elif not example:
            example = _describe(row)
    if not count:
        raise DataError("dataset holds no rows", where=str(path), fix="one JSON object per line is expected")
    if not seen:
        raise DataError(
            f"the format of the dataset cannot be told: {example or 'no row among the first is JSON'}",
            where=str(path),
            fix="give train_dataset_type / eval_dataset_type: " + ", ".join(FORMATS),
        )
    # Rows with tools are rare in a file of tool data, and only the chatml reader knows them.
    best = "chatml" if seen["chatml"] and not seen.keys() - {"chatml", "messages"} else seen.most_common(1)[0][0]
    return Detected(best, why[best])


def _guess(row: Any) -> Detected | None:
    if isinstance(row, list):
        if row and isinstance(row[0], dict) and "role" in row[0]:
            return Detected("messages", "each row is a list of role/content messages")
        return None
    if not isinstance(row, dict):
        return None
    if is_preference(row):
        fields = "`chosen` and `rejected`" if "chosen" in row else "`response` and `sort`"
        return Detected(PREFERENCE, f"rows have {fields}: preference data, needs `stage: DPO`")
    if "src" in row:
        return Detected("erniekit", "rows have `src` and `tgt`")
    if "messages" in row:
        said = row["messages"] if isinstance(row["messages"], list) else []
        calls = any(isinstance(m, dict) and (m.get("tool_calls") or m.get("role") == "tool") for m in said)
        if row.get("tools") or calls:
            return Detected("chatml", "rows have `messages` with tools")
        return Detected("messages", "rows have `messages`")
    if "instruction" in row or ("output" in row and "input" in row):
        return Detected("alpaca", "rows have `instruction` and `output`")
    return None


def _describe(row: Any) -> str:
    if not isinstance(row, dict):
        return "rows are not objects"
    for field, what in _ELSEWHERE.items():
        if field in row:
            return f"rows have `{field}`: {what}"
    return "rows have " + (", ".join(f"`{str(key)[:30]}`" for key in list(row)[:8]) or "no fields")
