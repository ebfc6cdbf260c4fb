"""What may be read in a folder that carries our MANIFEST.json: the files it lists. Others were added later.

Every reader of a checkpoint or an export gets its files from here: checkpoint/, lora/, export/, data/tokenizer.py.
Folders without a manifest of ours are read as they are; checkpoint/manifest.py compares files with their digests.
"""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.files.output import MANIFEST, MODEL_FILES
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.log import warn_once

# Names that a reader of ours would open; no reader opens a README.md beside them.
READ_NAMES = (*MODEL_FILES, "optimizer*.safetensors*", "master_weights*.safetensors*", "state.json")
_MAX_BYTES = 64 << 20
_OURS = b'{\n "format": '  # how a manifest of ours begins, whole or cut short


class Listed:
    """The files of one folder by name, as far as they may be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = _names(folder)

    @property
    def by_us(self) -> bool:
        """Whether the folder carries a manifest of ours."""
        return self._names is not None

    def allows(self, name: str) -> bool:
        """Whether a file of this name may be read. Warns once for each that is there and may not."""
        if self._names is None or name in self._names:
            return True
        if os.path.lexists(self.folder / name):
            warn_once(f"{self.folder / name} is not listed in {MANIFEST}, ignored: it was added after it was written")
        return False

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file() and self.allows(name)

    def glob(self, pattern: str) -> list[Path]:
        return [path for path in sorted(self.folder.glob(pattern)) if self.allows(path.name)]

    def added(self) -> list[str]:
        """Files that some reader would open and that are not listed."""
        if self._names is None:
            return []
        there = {path.name for path in self.folder.iterdir()}
        return sorted(n for n in there - self._names if any(fnmatch.fnmatchcase(n, p) for p in READ_NAMES))


def has_file(folder: Path, name: str) -> bool:
    """Whether a folder holds a file of this name that may be read."""
    return (folder / name).is_file() and Listed(folder).allows(name)


def refuse_added_tokenizer(folder: Path) -> None:
    """A vocabulary or a chat template put into a published model's folder would change every prompt: refused, not
    ignored, since it was put there to act."""
    found = [name for name in Listed(folder).added() if name in TOKENIZER_FILES]
    if found:
        raise CheckpointError(
            f"{', '.join(found)} is not listed in {MANIFEST}: it was added after this folder was written",
            where=str(folder),
            fix="move it away; or, if you put it there, use it from a folder of its own with the other tokenizer "
            f"files (tokenizer_name=DIR), or delete {MANIFEST}: the folder is then read whole, and no longer checked",
        )


def _names(folder: Path) -> frozenset[str] | None:
    """None: no manifest of ours, so every file counts."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(
            f"{MANIFEST} cannot be read: {error.strerror or error}", where=str(path), fix="run the same command again"
        ) from error
    try:
        manifest = json.loads(raw)
        ours = isinstance(manifest, dict) and {"files", "format", "sha256"} <= manifest.keys()
        if not ours:
            return None
        return frozenset(map(str, manifest["files"]))
    except (ValueError, RecursionError, TypeError):
        # An emptied file, or one whose blocks never reached the disk, is no other program's either.
        if not raw.startswith(_OURS) and not _OURS.startswith(raw.strip(b"\0 \t\r\n")):
            return None
        raise CheckpointError(
            f"{MANIFEST} is cut short or damaged",
            where=str(path),
            fix="use another copy of the folder; without the file it is read whole, and no longer checked",
        ) from None
