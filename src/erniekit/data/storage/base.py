"""What every place that holds a dataset file offers. Implemented by the other files of this folder, used by whatever
reads rows or text."""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from typing import Any

from erniekit import heartbeat

_READ = 1 << 20


class StoredFile(ABC):
    """One file to read from. `str()` of it is how the user wrote it."""

    name: str  # its last part: the suffix shows what kind of file it is

    @abstractmethod
    def open(self) -> io.BufferedReader:
        """From its beginning; can seek. DataError when it cannot be read."""

    @abstractmethod
    def size(self) -> int:
        """Bytes."""

    @abstractmethod
    def stamp(self) -> Any:
        """Changes when the file is written again; to compare before and after reading it."""

    def identity(self) -> tuple[str, int]:
        """A digest that is the same for the same content, and how many lines it has (0: not known)."""
        digest, lines = hashlib.blake2b(digest_size=20), 0
        with self.open() as file:
            while part := file.read(_READ):
                digest.update(part)
                lines += part.count(b"\n")
                heartbeat.beat()
        return digest.hexdigest(), lines

    def quick_identity(self) -> str:
        """Of the version that the place names, without reading the file."""
        stamp = json.dumps([str(self), self.stamp()])
        return hashlib.blake2b(stamp.encode(), digest_size=20).hexdigest()
