"""Why the format of a file cannot be detected, and what to do: by what the file holds instead of rows that are known.

Called by formats/__init__.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.data.formats.fields import ARRAYS, named
from erniekit.data.formats.files import is_array_by_name
from erniekit.errors import DataError
from erniekit.printable import plain

_ONE_OBJECT = 16 << 20  # bytes of a .json that is parsed whole to say what it is
_WHAT = "cannot detect the dataset format"


class NotJson(NamedTuple):
    line: int
    text: str
    reason: str


def described(row: Any) -> str:
    """A row that no reader takes, or one of an array."""
    if not isinstance(row, dict):
        return "rows are not objects"
    shown = (
        f"`{plain(str(key), 30)}`" + ("" if isinstance(value, str) else f" ({named(value)})")
        for key, value in islice(row.items(), 8)
    )
    return "rows have " + (", ".join(shown) or "no fields")


def undetected(
    path: str | Path, first: Any, problem: str, formats: Iterable[str], broken: NotJson | None = None
) -> DataError:
    """first: a decoded row that fits no format, None where none could be decoded. problem: of rows that could not.
    broken: the first line that is no JSON."""
    columns = (
        "name the columns, e.g. columns: {prompt: q, response: a}; or give train_dataset_type / eval_dataset_type: "
    )
    fix = columns + ", ".join(formats)
    found = f": {described(first) if first is not None else problem or 'no row among the first is JSON'}"
    if isinstance(first, dict) and "text_info" in first:
        found, fix = ": rows have `text_info`, with pictures or videos", "stage: VL-SFT reads them"
    elif isinstance(first, dict) and "text" in first and "label" in first:
        found = ": rows have `text` and `label`, a text and its class"
        fix = f"stage: CLS trains a classifier on them; for conversations {fix}"
    elif isinstance(first, dict) and "text" in first:
        found, fix = ": rows have `text`, plain text", f"stage: PT trains on plain text; for conversations {fix}"
    elif isinstance(first, list) and first and isinstance(first[0], dict):
        found = f": its first row is an array, in which {described(first[0])}"
        fix = f"an array of rows {ARRAYS}; or write one object per line: jq -c '.[]' FILE > rows.jsonl"
        if is_array_by_name(str(path)):
            fix = "take one of the two brackets away at both ends: a dataset is one array of rows"
    elif first is None and str(path).lower().removesuffix(".gz").endswith(".txt"):
        found, fix = ": it is plain text", "stage: PT trains on plain text; conversations are JSON, one object per line"
    elif (first is None or not isinstance(first, dict)) and (whole := _one_object(path)) is not None:
        found = ": the file is one JSON object with " + ", ".join(f"`{plain(str(key), 30)}`" for key in list(whole)[:8])
        fix = "a dataset is a JSON array of rows, or one object per line"
        inside = next((key for key, value in whole.items() if isinstance(value, list) and value), None)
        if inside is not None and inside.isidentifier() and isinstance(whole[inside][0], dict):
            fix += f"; if `{inside}` holds the rows, save that list as a file: jq .{inside} FILE > rows.json"
    elif first is None and not problem and broken is not None:
        found, fix = f": line {broken.line} is not JSON: {broken.reason}", _one_a_line(broken)
    return DataError(_WHAT + found, where=str(path), fix=fix)


def _one_a_line(broken: NotJson) -> str:
    fix, text = "write one JSON object on each line", broken.text.strip()
    if re.match(r"\{\s*'", text):
        return f"{fix}; JSON has double quotes: Python's json.dumps writes them, print does not"
    if text.endswith(","):
        return f"{fix}, without a comma after it"
    return fix


def _one_object(path: str | Path) -> dict[str, Any] | None:
    """A .json that is an object over several lines: settings, or rows below a key."""
    place = Path(path)
    if not str(path).lower().endswith(".json") or not place.is_file() or place.stat().st_size > _ONE_OBJECT:
        return None
    try:
        value = json.loads(place.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None
