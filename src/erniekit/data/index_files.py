"""The files of an index run: its work folder and what is published, and which of them are ours to replace.

Used by index.py and, for the cache, pretrain.py.
"""

from __future__ import annotations

import filecmp
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from erniekit.data import mmap_files, sealed
from erniekit.errors import DataError
from erniekit.files import NotOurs
from erniekit.files.part_file import part_of

TOKENS, SIZES, SEQUENCES, BAD, INDEX = "tokens", "sizes", "sequences", "bad_rows.jsonl", "index"
STATE = "state.json"
_PART = part_of(Path(STATE)).name
_WORK_FILES = (TOKENS, SIZES, SEQUENCES, BAD, INDEX, _PART, STATE)


def bad_rows_of(output: Path) -> Path:
    return output.with_name(f"{output.name}_{BAD}")


def published_names(output: Path, format: str = "bin") -> list[str]:
    tokens, index = (f"{output.name}{suffix}" for suffix in mmap_files.SUFFIXES[format])
    return [tokens, f"{index}.json", bad_rows_of(output).name, index]


def is_published(output: Path, format: str = "bin") -> bool:
    return Path(str(output) + mmap_files.SUFFIXES[format][1]).exists()  # the last to get its name


def is_intact(output: Path, format: str = "bin") -> bool:
    """Whether the files are those that were published; one of a version that kept no record of them is taken as is."""
    try:
        stored = json.loads(Path(f"{output}{mmap_files.SUFFIXES[format][1]}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "files" not in stored or sealed.intact(output.parent, stored["files"])


def is_plan(stored: Any, plan: dict[str, Any]) -> bool:
    """Whether files were made by this plan. Plans of earlier versions know a file's text by its size and date alone."""
    if not isinstance(stored, dict):
        return False
    return stored == (plan if "content" in stored else {key: plan[key] for key in plan if key != "content"})


def refuse_foreign(output: Path, work: Path, format: str, plan: dict[str, Any]) -> None:
    """Raises where the work folder or a file that will be published exists and is not of this very run.

    A run that was killed while it published has put some of its files in place: it is finished by its own state, and
    those files are its own.
    """
    state = _json(work / STATE)
    if os.path.lexists(work) and (work.is_symlink() or not work.is_dir() or ("plan" not in state and _begun(work))):
        raise NotOurs(
            f"{work.name} exists and is not the work folder of an index run",
            where=str(work),
            fix="give another --output, or move it away",
        )
    tokens, index = (Path(str(output) + suffix) for suffix in mmap_files.SUFFIXES[format])
    stored, listed = Path(f"{index}.json"), bad_rows_of(output)
    publishing = bool(state.get("finished")) and is_plan(state.get("plan"), plan)
    owned = {
        tokens: publishing and not (work / TOKENS).exists(),
        stored: publishing and is_plan(_json(stored).get("plan"), plan),
        listed: publishing and _same(work / BAD, listed),
    }
    for path, is_ours in owned.items():
        if os.path.lexists(path) and (path.is_symlink() or not is_ours):
            raise NotOurs(
                f"{path.name} exists and was not written by this index run",
                where=str(path),
                fix="give another --output, or move it away",
            )


def remove_work(work: Path) -> None:
    """Our files of the work folder, and the folder if it is empty then. The state goes last."""
    for name in _WORK_FILES:
        with suppress(FileNotFoundError, IsADirectoryError):
            (work / name).unlink()
    with suppress(OSError):
        work.rmdir()


def _begun(work: Path) -> bool:
    """Whether the folder holds more than the state of a run killed before it wrote anything else."""
    return any(path.name != _PART for path in work.iterdir())


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}", where=str(path), fix="try again") from error
    return value if isinstance(value, dict) else {}
