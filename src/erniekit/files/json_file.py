"""A JSON file of an untrusted folder, read within bounds: size, nesting, and an object at the top.

Called for every small JSON file of a model, an adapter or a checkpoint. Errors of the system pass through.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from erniekit.errors import ErnieKitError
from erniekit.files.special import refuse_special

MAX_BYTES = 16 << 20  # config.json and its like have some kilobytes
MAX_DEPTH = 64  # of lists and objects in each other; what is written from it nests as deep again
_FIX = "download or copy the file again"


class RepeatedKey(ValueError):
    """One object of a JSON text gives a key twice: which of the two values was meant is not known."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"`{key[:60]}` is given twice in one object")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`. Raises RepeatedKey."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RepeatedKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return value


def read_value(path: Path, error: type[ErnieKitError], max_bytes: int = MAX_BYTES) -> Any:
    """The JSON value in `path`. Raises `error` for what is no JSON, too large or too deep; OSError as it comes."""
    refuse_special(path, error)
    with path.open("rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        limit = f"{max_bytes >> 20} MiB" if max_bytes >> 20 else f"{max_bytes} bytes"
        raise error(f"{path.name} is larger than {limit}, the limit of such files", where=str(path), fix=_FIX)
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as reason:
        raise error(f"{path.name} is not JSON: {reason}", where=str(path), fix=_FIX) from None
    if nests_deeper(value):
        raise error(f"{path.name} is nested more than {MAX_DEPTH} deep", where=str(path), fix=_FIX)
    return value


def read_object(path: Path, error: type[ErnieKitError], max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    value = read_value(path, error, max_bytes)
    if not isinstance(value, dict):
        raise error(f"{path.name} is not a JSON object", where=str(path), fix=_FIX)
    return value


def nests_deeper(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Level by level: a recursive walk would fail on the very thing it looks for."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
        if not level:
            return False
    return bool(level)
