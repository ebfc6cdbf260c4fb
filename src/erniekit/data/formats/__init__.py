"""Dataset formats: their tables, which format a file has, and its rows as conversations, pairs or problems.

Called by the token cache (`rows` in one process, `parse` and `parse_pair` in its workers), by doctor and by
`erniekit data`.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from erniekit.data.formats.fields import BadRow, is_preference, refuse_media, require
from erniekit.data.formats.files import MAX_ROW_BYTES, TOO_MANY_DIGITS, Raw, decode, rows
from erniekit.data.preference import Preference
from erniekit.data.types import Conversation, RowProblem
from erniekit.errors import DataError
from erniekit.files.json_file import RepeatedKey
from erniekit.printable import plain
from erniekit.registry import Registry

__all__ = [
    "FORMATS",
    "MAX_ROW_BYTES",
    "PREFERENCE_FORMATS",
    "Detected",
    "Raw",
    "detect",
    "parse",
    "parse_pair",
    "parsed",
    "read",
    "rows",
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
    },
    group="erniekit.formats",
)
# For rows with two answers to compare: `preference(row, compat) -> Preference`.
PREFERENCE_FORMATS = Registry(
    "dataset type",
    {
        "erniekit": "erniekit.data.formats.erniekit:preference",
        "alpaca": "erniekit.data.formats.alpaca:preference",
        "messages": "erniekit.data.formats.messages:preference",
        "chatml": "erniekit.data.formats.messages:preference",
    },
)
_LOOK_AT = 50  # rows
_ELSEWHERE = {
    "text_info": "image and video rows; they need stage VL-SFT",
    "conversations": "ShareGPT rows; rename `conversations` to `messages`, from/value to role/content",
    "text": "plain text; it needs stage PT",
}


@dataclass(frozen=True)
class Detected:
    format: str  # a name in FORMATS and PREFERENCE_FORMATS
    why: str
    preference: bool = False  # rows hold two answers to compare: data for stage DPO
    vision: bool = False  # some hold pictures or videos


@functools.cache
def _reader(format: str) -> Callable[[Any, bool], list[Conversation]]:
    return FORMATS.get(format)


@functools.cache
def _pair_reader(format: str) -> Callable[[Any, bool], Preference]:
    return PREFERENCE_FORMATS.get(format)


def parse(
    raw: Raw, line_no: int, path: str | Path, format: str, compat: bool = False
) -> list[Conversation] | RowProblem:
    """One raw row as its training conversations (several for tool rows). Depends on nothing but its arguments."""

    def conversations(row: Any) -> list[Conversation]:
        if isinstance(row, dict) and is_preference(row):
            raise BadRow("preference", "the row holds two answers to compare: preference data needs `stage: DPO`")
        if isinstance(row, dict) and not compat:
            refuse_media(row)
        return _reader(format)(row, compat)

    return parsed(raw, line_no, path, conversations)


def parse_pair(raw: Raw, line_no: int, path: str | Path, format: str, compat: bool = False) -> Preference | RowProblem:
    """One raw row as the pair of answers it compares. Depends on nothing but its arguments."""

    def pair(row: Any) -> Preference:
        if isinstance(row, dict) and not is_preference(row):
            require(row, *(("response", "sort") if format == "erniekit" else ("chosen", "rejected")))
        if isinstance(row, dict) and not compat:
            refuse_media(row)
        return _pair_reader(format)(row, compat)

    return parsed(raw, line_no, path, pair)


def parsed(raw: Raw, line_no: int, path: str | Path, read: Callable[[Any], T]) -> T | RowProblem:
    """What `read` makes of the decoded row; its BadRow, and whatever cannot be decoded, as a problem of that line."""
    if isinstance(raw, RowProblem):
        return raw
    try:
        return read(decode(raw))
    except BadRow as bad:
        return RowProblem(str(path), line_no, bad.kind, bad.reason)
    except UnicodeDecodeError as error:
        utf16 = isinstance(raw, bytes) and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "the file looks like UTF-16, " if utf16 else ""
        return RowProblem(
            str(path), line_no, "bad_utf8", f"byte {error.start + 1} is not UTF-8; {hint}save it as UTF-8"
        )
    except json.JSONDecodeError as error:
        return RowProblem(str(path), line_no, "bad_json", f"not JSON: {error.msg} (column {error.colno})")
    except RepeatedKey as error:
        return RowProblem(str(path), line_no, "repeated_key", str(error))
    except ValueError:  # a number of more digits than Python converts
        return RowProblem(str(path), line_no, "bad_json", TOO_MANY_DIGITS)
    except RecursionError:
        return RowProblem(str(path), line_no, "deep_nesting", "the row is nested too deeply")


def read(path: str | Path, format: str, compat: bool = False) -> Iterator[tuple[int, Conversation | RowProblem]]:
    _reader(format)  # an unknown name is said before the file is opened
    for line_no, raw in rows(path):
        found = parse(raw, line_no, path, format, compat)
        if isinstance(found, RowProblem):
            yield line_no, found
        else:
            for conversation in found:
                yield line_no, conversation


def detect(path: str | Path, vision: bool = False) -> Detected:
    """The format of the first rows, by their fields. DataError when they fit none. vision: rows may hold pictures."""
    seen: Counter[tuple[str, bool]] = Counter()
    found: dict[tuple[str, bool], Detected] = {}
    example, count, foreign = "", 0, 0
    for _, raw in islice(rows(path), _LOOK_AT):
        count += 1
        if isinstance(raw, RowProblem):
            example = example or raw.reason
            continue
        try:
            row = decode(raw)
        except RepeatedKey as error:
            example = example or str(error)
            continue
        except UnicodeDecodeError:
            foreign += 1
            continue
        except (ValueError, RecursionError):
            foreign += isinstance(raw, bytes) and b"\0" in raw  # UTF-16 without a mark at its beginning
            continue
        guess = _guess(row)
        if vision:
            guess = _guess_seen(row) or guess
        if guess:
            seen[guess.format, guess.preference] += 1
            before = found.get((guess.format, guess.preference))
            found[guess.format, guess.preference] = before if before and before.vision else guess
        elif not example:
            example = _describe(row)
    if not count:
        raise DataError("dataset holds no rows", where=str(path), fix="one JSON object per line is expected")
    if not seen and foreign:
        raise DataError("dataset is not UTF-8 text", where=str(path), fix="save it as UTF-8, one JSON object per line")
    if not seen:
        raise DataError(
            f"cannot detect the dataset format: {example or 'no row among the first is JSON'}",
            where=str(path),
            fix="give train_dataset_type / eval_dataset_type: " + ", ".join(FORMATS),
        )
    # Rows with tools are rare in a file of tool data, and only the chatml reader knows them.
    tools = ("chatml", False)
    alone = tools in seen and not seen.keys() - {tools, ("messages", False)}
    seeing = [kind for kind, _ in seen.most_common() if found[kind].vision]
    return found[seeing[0] if seeing else tools if alone else seen.most_common(1)[0][0]]


def _guess(row: Any) -> Detected | None:
    if isinstance(row, list):
        if row and isinstance(row[0], dict) and "role" in row[0]:
            return Detected("messages", "each row is a list of role/content messages")
        return None
    if not isinstance(row, dict):
        return None
    if is_preference(row):
        return _guess_pair(row)
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


def _guess_seen(row: Any) -> Detected | None:
    """Of a row with pictures or videos."""
    if isinstance(row, dict) and ("text_info" in row or "text_list" in row):
        return Detected("erniekit", "rows have `text_info`, with pictures or videos", vision=True)
    pairs = isinstance(row, dict) and is_preference(row)
    fields = ("messages", "prompt", "chosen", "rejected") if pairs else ("messages",)
    said = [row.get(field) for field in fields] if isinstance(row, dict) else [row]
    contents = [m.get("content") for one in said if isinstance(one, list) for m in one if isinstance(m, dict)]
    kinds = {part.get("type") for c in contents if isinstance(c, list) for part in c if isinstance(part, dict)}
    beside = isinstance(row, dict) and any(row.get(name) for name in ("images", "image", "videos", "video"))
    if (contents or pairs) and (beside or kinds & {"image", "image_url", "video", "video_url"}):
        if pairs:
            why = "rows have pictures or videos and two answers: preference data, for `stage: DPO`"
            return Detected(_guess_pair(row).format, why, preference=True, vision=True)
        return Detected("messages", "rows have `messages` with pictures or videos", vision=True)
    return None


def _guess_pair(row: dict[str, Any]) -> Detected:
    if row.get("response") is not None and row.get("sort") is not None:
        format, fields = "erniekit", "`response` and `sort`"
    else:
        chosen = row.get("chosen")
        said = chosen[0] if isinstance(chosen, list) and chosen else chosen
        listed = isinstance(said, dict) or any(isinstance(row.get(field), list) for field in ("messages", "prompt"))
        format, fields = "messages" if listed else "alpaca", "`chosen` and `rejected`"
    return Detected(format, f"rows have {fields}: preference data, for `stage: DPO`", preference=True)


def _describe(row: Any) -> str:
    if not isinstance(row, dict):
        return "rows are not objects"
    for field, what in _ELSEWHERE.items():
        if field in row:
            return f"rows have `{field}`: {what}"
    return "rows have " + (", ".join(f"`{plain(str(key), 30)}`" for key in list(row)[:8]) or "no fields")
