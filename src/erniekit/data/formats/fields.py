"""Reading fields of a row with reasons a person can act on.

Used by every format in this folder; a wrong field raises BadRow, which becomes a RowProblem with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from erniekit.printable import counted, plain

# Fields of rows whose text is about something else than text.
_MEDIA = ("image", "images", "image_info", "video", "videos", "video_info", "audio", "audios")
ARRAYS = "is read where the name of its file ends in .json"
_LONGEST_NAME = 60  # characters
_JSON_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}


class BadRow(ValueError):
    """`kind` is a short slug that reports count by, `reason` one sentence naming the field."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def named(value: Any) -> str:
    """The type of a JSON value, for messages."""
    if isinstance(value, float) and value != value:
        return "NaN"
    return _JSON_NAMES.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def row_named(row: Any) -> str:
    """The type of a row that should be an object."""
    rows = isinstance(row, list) and row and isinstance(row[0], dict)
    return f"{named(row)} of objects: an array of rows, which {ARRAYS}" if rows else named(row)


def require(row: Mapping[str, Any], *fields: str) -> None:
    for field in fields:
        if row.get(field) is None:
            if field in row:
                raise BadRow("missing_field", f"`{field}` is null or an empty cell")
            has = ", ".join(map(str, list(row)[:8])) or "nothing"
            raise BadRow("missing_field", f"`{field}` is missing; the row has {has[:120]}")


def holds(value: Any) -> bool:
    """Whether a field has anything to lose: tables fill absent ones with null or nothing."""
    return value is not None and value != "" and value != [] and value != {}


def unread(row: Mapping[str, Any], known: Collection[str], where: str = "") -> list[str]:
    """The fields of `row` that hold something and are not known, named as reports count them: `messages[].name`."""
    names = [name for name, value in row.items() if name not in known and holds(value)]
    return [f"{general(where)}{plain(str(name), _LONGEST_NAME)}" for name in names]


def general(place: str) -> str:
    """`messages[3]` -> `messages[]`"""
    return re.sub(r"\[\d+\]", "[]", place)


def refuse_media(row: Mapping[str, Any]) -> None:
    for field in _MEDIA:
        if holds(row.get(field)):
            raise BadRow("not_text", f"the row has `{field}`; images, video and sound need stage VL-SFT")


def refuse_tools(row: Mapping[str, Any]) -> None:
    if holds(row.get("tools")):
        raise BadRow("tools", "the row has `tools`, and answers that are text: write them as lists of messages")


def text(value: Any, field: str, *, empty: bool = False) -> str:
    """A string that can be tokenised; blank ones only where `empty` allows them."""
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"`{field}` must be text, not {named(value)}")
    if not empty and not value.strip():
        raise BadRow("empty_text", f"`{field}` is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("bad_unicode", f"`{field}` holds half of a surrogate pair, or bytes that are not UTF-8") from None
    return value


def texts(value: Any, field: str) -> list[str]:
    """A list of strings; one string stands for a list of one."""
    if isinstance(value, str):
        return [text(value, field)]
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"`{field}` must be text or a list of texts, not {named(value)}")
    if not value:
        raise BadRow("empty_text", f"`{field}` is an empty list")
    return [text(item, f"{field}[{i}]") for i, item in enumerate(value)]


def flag(value: Any, field: str) -> bool:
    """0/1 or true/false."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise BadRow("bad_label", f"`{field}` must be 0 or 1")


def flags(value: Any, field: str, count: int, of: str) -> list[bool]:
    """One flag per turn; absent means all trained. of: what has them, one of them."""
    if value is None:
        return [True] * count
    given = value if isinstance(value, list) else [value]
    if len(given) != count:
        has = counted(len(given), "entry", "entries")
        raise BadRow("length_mismatch", f"`{field}` has {has} for {counted(count, of)}")
    return [flag(item, f"{field}[{i}]") for i, item in enumerate(given)]


def is_preference(row: Mapping[str, Any]) -> bool:
    """Two answers to compare: data for stage DPO."""
    pairs = (("response", "sort"), ("chosen", "rejected"))
    return any(row.get(one) is not None and row.get(other) is not None for one, other in pairs)
