"""What in a tree is not ours: checked before a whole folder of ours is deleted (a web job, an earlier demo)."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from erniekit.files.output import MODEL_FILES, RUN_FILES
from erniekit.files.record import RECORD, OwnedFiles, content_of, is_inside

MANIFEST = "MANIFEST.json"
# Files of ours without a line in a record: locks, what a kill leaves behind, hang reports, and what loggers write.
_UNLISTED = re.compile(
    r"\.erniekit[a-z_.-]*\.lock|\.(tmp|del|old)-.+-\d+-[0-9a-f]{8}|\.seen-[0-9a-f]{16}|rank-\d+-step-\d+\.txt"
    r"|events\.out\.tfevents\..+|vdlrecords\..+\.log"
)
# Written under another name, then renamed.
_PARTS = ("recipe.yaml", "dpo_train_args.json", "command.txt", "job.json", *RUN_FILES)


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
            if not _UNLISTED.fullmatch(item.name) and not (item.name == "wandb" and "wandb_run_id" in entries):
                yield from _walk(path, listed)
        elif path not in listed and item.name != RECORD and not _is_left_over(item.name):
            yield path


def _in_manifest(folder: Path) -> frozenset[Path]:
    """The files of a checkpoint or an export that are as they were written."""
    path = folder / MANIFEST
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        listed = {
            folder / name: (int(record["size"]), str(record["sha256"]))
            for name, record in files.items()
            if is_inside(name)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return frozenset()
    same = (file for file, content in listed.items() if file.is_file() and content_of(file, content[1])[:2] == content)
    return frozenset(same) | {path}


def _is_left_over(name: str) -> bool:
    if _UNLISTED.fullmatch(name):
        return True
    if name.startswith(".new-"):
        return any(fnmatch.fnmatchcase(name.removeprefix(".new-"), pattern) for pattern in MODEL_FILES)
    return any(name.startswith(f".{part}.") and name.endswith(".part") for part in _PARTS)
