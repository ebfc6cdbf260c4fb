"""A dataset file in an object store (s3://, gs://, oss://, memory:// ...), streamed through fsspec."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

from erniekit.data.storage.base import Identity, StoredFile, Unchanged
from erniekit.errors import DataError
from erniekit.extras import install_command
from erniekit.printable import public

_BUFFER = 1 << 20
# What the stores call the version of a file.
_VERSION = (
    "ETag",
    "etag",
    "md5",
    "md5Hash",
    "checksum",
    "generation",
    "version_id",
    "mtime",
    "LastModified",
    "created",
)


class ObjectFile(StoredFile):
    def __init__(self, url: str) -> None:
        self.url, self.name = url, url.rpartition("/")[2]
        try:
            import fsspec
        except ImportError as error:
            raise DataError("object stores need fsspec", where=url, fix=install_command("remote")) from error
        try:
            self._store, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # the store's own package is missing, or it is no store
            raise DataError(
                f"no reader for {url.partition('://')[0]}:// is installed: {error}",
                where=url,
                fix="install the package it names",
            ) from error

    def __str__(self) -> str:
        return public(self.url)

    def open(self) -> io.BufferedReader:
        self._info()
        try:
            return io.BufferedReader(self._store.open(self._path, "rb"), _BUFFER)
        except Exception as error:  # every store raises its own
            raise self._unreadable(error) from error

    def size(self) -> int:
        return int(self._info().get("size") or 0)

    def stamp(self) -> Any:
        info = self._info()
        versions = [f"{name} {info[name]}" for name in _VERSION if info.get(name) is not None]
        self.names_version = bool(versions)
        return [str(info.get("size")), *versions]

    def identity(self) -> Identity:
        """By address and version where the store names one; else by content, which reads all of it once more."""
        stamp = self.stamp()
        if len(stamp) < 2:
            return self.identity_by_content(stamp)
        told = json.dumps([public(self.url), stamp])
        return Identity(hashlib.blake2b(told.encode(), digest_size=20).hexdigest(), 0, Unchanged(self, stamp))

    def listed(self) -> list[str]:
        """The files below it, where it is a folder or a pattern, in the order of their names."""
        try:
            if "*" in self._path:
                found = sorted(self._store.glob(self._path))
            else:
                found = sorted(self._store.find(self._path)) if self._store.isdir(self._path) else []
        except Exception as error:
            raise self._unreadable(error) from error
        return [self._store.unstrip_protocol(name) for name in found]

    def _info(self) -> dict[str, Any]:
        try:
            self._store.invalidate_cache()
            return dict(self._store.info(self._path))
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(
            f"dataset cannot be read: {type(error).__name__}: {error}",
            where=self.url,
            fix="check the address and the credentials of the store",
        )
