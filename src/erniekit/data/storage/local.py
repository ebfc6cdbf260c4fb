"""A dataset file on this machine's disks."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from erniekit.data import sealed
from erniekit.data.storage.base import StoredFile
from erniekit.errors import DataError
from erniekit.files import refuse_special

_BUFFER = 1 << 20
_FIX = "check train_dataset_path / eval_dataset_path"


class LocalFile(StoredFile):
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def __str__(self) -> str:
        return str(self.path)

    def refuse_other(self) -> None:
        """Raises DataError for what is no file: a pipe, a device, a folder, a link to nowhere."""
        refuse_special(self.path, DataError)
        if self.path.is_file():
            return
        if self.path.is_symlink() and not self.path.exists():
            what, fix = f"is a link to {os.readlink(self.path)}, which does not exist", "repair or remove the link"
        else:
            what, fix = "is a folder, not a file" if self.path.is_dir() else "does not exist", _FIX
        raise DataError(f"dataset {what}", where=str(self.path), fix=fix)

    def open(self) -> io.BufferedReader:
        self.refuse_other()
        try:
            return io.BufferedReader(io.FileIO(self.path), _BUFFER)
        except OSError as error:
            raise DataError(f"dataset cannot be read: {error.strerror}", where=str(self.path), fix=_FIX) from error

    def size(self) -> int:
        return self.path.stat().st_size

    def stamp(self) -> Any:
        try:
            state = self.path.stat()
        except OSError:  # opening it says what is wrong
            return None
        return state.st_size, state.st_mtime_ns, state.st_ino

    def quick_identity(self) -> str:
        """Of its content, of a large file by blocks all over it: a copy elsewhere is the same."""
        self.open().close()
        return str(sealed.record(self.path)[1])
