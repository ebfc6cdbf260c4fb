"""A file that is whole or absent: written beside its place, then renamed.

Used by track/atomic.py, data/stream_store.py, data/index.py and export/run.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def part_of(path: Path) -> Path:
    """Where it is written. One name: what a kill leaves behind is removed next time."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def part_file(path: Path, sync: bool = False) -> Iterator[TextIO]:
    """A file to write; it takes the place of `path` only when the block ends without an error. sync: it outlives a
    power failure, too. Bytes of a path that are no UTF-8 are written as escapes, which JSON reads back as they were."""
    part = part_of(path)
    part.unlink(missing_ok=True)
    try:
        # x: a link of that name is never followed.
        with part.open("x", encoding="utf-8", errors="backslashreplace") as out:
            yield out
            if sync:
                out.flush()
                os.fsync(out.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
