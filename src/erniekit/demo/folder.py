"""The demo's folder: an earlier demo in it is cleared, anything else is kept. Used by recipes/demo.py.

Only the folders named here are the demo's. A finished demo lists its files with size and time, so that a run which a
user continued in one of them is not mistaken for the demo's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from erniekit.checkpoint.writer import remove_tree, working_name
from erniekit.errors import ConfigError
from erniekit.files import NotOurs, OwnedFiles
from erniekit.files.record import some
from erniekit.files.walk import foreign_files
from erniekit.track.atomic import write_text

MARK = ".made-by-erniekit-demo"
FOLDERS = ("data", "logs", "model", "sft", "killed", "lora")
MODEL = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "special_tokens_map.json",
    "tokenizer_config.json", "preprocessor_config.json",
)  # fmt: skip


def take_folder(root: Path) -> Path:
    """An empty folder, or that of an older demo, whose own folders are replaced."""
    if os.path.lexists(root) and not _is_mark(root / MARK) and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} is in use and not by a demo", where="--dir", fix="name another folder: --dir DIR")
    if foreign := [path.relative_to(root).as_posix() for path in _not_the_demos(root)]:
        raise NotOurs(
            f"{root} holds {some(foreign)}, not written by the demo, in a folder that a new demo replaces",
            where="--dir",
            fix="move it away, or name another folder: --dir DIR",
        )
    root.mkdir(parents=True, exist_ok=True)
    write_text(root / MARK, "")  # from here on, until `seal`, a demo is under way
    for name in FOLDERS:
        if os.path.lexists(root / name):
            remove_tree(root / name)
    for name in ("data", "logs", "model"):
        (root / name).mkdir()
    OwnedFiles(root / "model").announce((*MODEL, working_name("model", 0)))
    return root


def _is_mark(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def seal(root: Path) -> None:
    """The demo is over: what it wrote, as it is now."""
    foreign = {path for name in FOLDERS if (root / name).is_dir() for path in foreign_files(root / name)}
    found = {path.relative_to(root).as_posix(): _state(path) for path in _files(root) if path not in foreign}
    write_text(root / MARK, json.dumps(found, indent=0))


def _not_the_demos(root: Path) -> Iterator[Path]:
    """Of a finished demo: files it does not list, or changed since. Of one that was killed: files no record lists."""
    listed = _listed(root)
    if listed:
        yield from (path for path in _files(root) if listed.get(path.relative_to(root).as_posix()) != _state(path))
        return
    for name in FOLDERS:
        if (root / name).is_symlink():
            yield root / name
        elif (root / name).is_dir():
            yield from foreign_files(root / name)


def _files(root: Path) -> Iterator[Path]:
    for name in FOLDERS:
        if (root / name).is_symlink():
            yield root / name
            continue
        yield from (path for path in (root / name).rglob("*") if path.is_symlink() or not path.is_dir())


def _state(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_size, found.st_mtime_ns]


def _listed(root: Path) -> dict[str, list[int]]:
    try:
        value = json.loads((root / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
