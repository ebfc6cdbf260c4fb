"""Files that are whole or absent, and on the disk when they are there. Used all over this folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from erniekit.files.part_file import part_file


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file to write; it takes the place of `path` only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with part_file(path, sync=True) as out:
        yield out


def write_text(path: Path, text: str) -> None:
    with replacing(path) as out:
        out.write(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The same value in strict JSON's types: NaN and infinities become null, anything unknown its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays, without importing numpy
        return plain(value.tolist())
    return str(value)
