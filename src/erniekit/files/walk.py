"""What in a tree is not ours: asked before a whole folder of ours is deleted (a web job, an earlier demo)."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from pathlib import Path

from erniekit.files.record import RECORD, OwnedFiles

MANIFEST = "MANIFEST.json"
# Files of ours without a line in a record: locks, what a kill leaves behind, hang reports, and what loggers write.
UNLISTED = (
    ".erniekit*.lock", ".*.part", ".new-*", ".seen-*", ".tmp-*", ".del-*", ".old-*", "rank-*-step-*.txt",
    "events.out.tfevents.*", "vdlrecords.*.log",
)  # fmt: skip
LOGGER_FOLDERS = ("wandb",)  # written by a logger alone


def foreign_files(folder: Path, also_ours: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `folder` that no record or manifest lists, and every link. `also_ours`: names at the top of it."""
    yield from _walk(folder, frozenset(folder / name for name in also_ours))


def _walk(folder: Path, listed: frozenset[Path]) -> Iterator[Path]:
    owned = OwnedFiles(folder)
    entries = owned.entries()
    listed |= {folder / name for name in entries if owned.is_ours(name, entries)} | _in_manifest(folder)
    with os.scandir(folder) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        path = Path(item.path)
        if item.is_symlink():
            yield path
        elif item.is_dir():
            if not _unlisted(item.name) and item.name not in LOGGER_FOLDERS:
                yield from _walk(path, listed)
        elif path not in listed and item.name != RECORD and not _unlisted(item.name):
            yield path


def _in_manifest(folder: Path) -> frozenset[Path]:
    """The files of a checkpoint or an export, as long as they have the size they were written with."""
    path = folder / MANIFEST
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        sizes = {folder / name: int(record["size"]) for name, record in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(file for file, size in sizes.items() if file.is_file() and file.stat().st_size == size) | {path}


def _unlisted(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in UNLISTED)
