"""What every place that holds a dataset file offers. Implemented by the other files of this folder, used by whatever
reads rows or text."""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

from erniekit import heartbeat
from erniekit.errors import DataError

_READ = 1 << 20


class Stamped(Protocol):
    def stamp(self) -> Any: ...


class Unchanged:
    """A file that has to stay as it was when `stamp` was taken, until all of it is read."""

    def __init__(self, stored: Stamped, stamp: Any) -> None:
        self._stored, self._stamp = stored, stamp

    def check(self) -> None:
        if self._stored.stamp() != self._stamp:
            raise DataError(
                "dataset changed while it was read", where=str(self._stored), fix="start again once it is whole"
            )


class Identity(NamedTuple):
    digest: str  # the same for the same content
    lines: int  # 0: not known
    unchanged: Unchanged  # since before the digest was computed: what is kept under it is of that content


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

    def identity(self) -> Identity:
        """By content; other places may know a version instead."""
        return self.identity_by_content(self.stamp())

    def identity_by_content(self, stamp: Any) -> Identity:
        """Reads all of it, since `stamp`."""
        digest, lines = hashlib.blake2b(digest_size=20), 0
        with self.open() as file:
            while part := file.read(_READ):
                digest.update(part)
                lines += part.count(b"\n")
                heartbeat.beat()
        return Identity(digest.hexdigest(), lines, Unchanged(self, stamp))

    def quick_identity(self) -> str:
        """Of the version that the place names, without reading the file."""
        told = json.dumps([str(self), self.stamp()])
        return hashlib.blake2b(told.encode(), digest_size=20).hexdigest()
