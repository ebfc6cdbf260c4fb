"""What every place that holds a dataset file offers. Implemented by the other files of this folder, used by whatever
reads rows or text."""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from typing import Any, Protocol

from erniekit import heartbeat
from erniekit.errors import DataError

_READ = 1 << 20


class Stamped(Protocol):
    def stamp(self) -> Any: ...


class StoredFile(ABC):
    """One file to read from. `str()` of it is how the user wrote it."""

    name: str  # its last part: the suffix says what kind of file it is
    names_version = True  # whether `stamp` changes with a content of the same length; known once it was called

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
        told = json.dumps([str(self), self.stamp()])
        return hashlib.blake2b(told.encode(), digest_size=20).hexdigest()


class Unchanged:
    """A file that has to stay as it is from now until all of it is read. Made before its digest is computed: what is
    kept under that digest is of that content."""

    def __init__(self, stored: Stamped) -> None:
        self._stored, self._stamp = stored, stored.stamp()

    def check(self) -> None:
        if self._stored.stamp() != self._stamp:
            raise DataError(
                "dataset changed while it was read", where=str(self._stored), fix="start again once it is whole"
            )
