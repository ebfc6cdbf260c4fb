"""Private files: what the page stores, readable by its owner alone: folders 0700, files 0600.

Used by jobs.py, uploads.py and run_names.py.

Recipes, logs and uploads may hold addresses with passwords or signatures in them, and data of one person.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO

from erniekit.printable import public

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def private_folder(path: Path) -> Path:
    """Create a folder, or close one that an earlier version left open to others; those of other users stay as they
    are."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(FOLDER_MODE)
    return path


def create(path: Path) -> BinaryIO:
    """A new file; FileExistsError where there is one, a link included."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb")


def append(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE), "ab")


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: a reader sees the old content or the new one."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(3)}.part")
    with create(part) as file:
        file.write(text.encode("utf-8"))
    os.replace(part, path)


def read_secret(path: Path) -> str:
    """Stripped; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def public_value(value: Any) -> Any:
    """A value of a recipe without passwords and signatures of the addresses in it, as the page may show it."""
    if isinstance(value, str):
        return public(value)
    if isinstance(value, dict):
        return {name: public_value(item) for name, item in value.items()}
    return [public_value(item) for item in value] if isinstance(value, (list, tuple)) else value
