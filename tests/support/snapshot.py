"""A tree as it is: every file's bytes, every link's target; to compare before and after a command."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def snapshot(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = _state(path)
    return found


def _state(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "folder"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What is gone or different; what is new does not count."""
    return sorted(name for name, state in before.items() if after.get(name) != state)
