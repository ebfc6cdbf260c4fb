"""Where the bytes of a picture or video are: a file, a member of an archive, or the row itself.

Rows name them (`located`), the token cache keeps the answer, the workers open it (`read`). Archives are read in place.
"""

from __future__ import annotations

import base64
import binascii
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlparse

from erniekit.data.media.limits import MediaError, MediaLimits, because
from erniekit.files.media_folders import may_be_read

_ARCHIVE = re.compile(r"^(.*?\.(?:tar|zip))/(.+)$", re.IGNORECASE)
_BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError,
    RuntimeError,
)  # fmt: skip
_NO_SEEK = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)/", re.IGNORECASE)


@dataclass(frozen=True)
class MediaPlace:
    path: str = ""  # a file; the archive, with `member`; the cache's file of inline media, with `size`
    member: str = ""
    start: int = 0
    size: int = -1  # bytes from `start`; -1: the whole file
    label: str = ""  # what messages call it, where it has no path of its own
    content: bytes = field(default=b"", repr=False)  # the bytes themselves, until the cache keeps them

    @property
    def name(self) -> str:
        return self.label or (f"{self.path}/{self.member}" if self.member else self.path)

    def to_json(self) -> dict[str, Any]:
        assert not self.content
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MediaPlace:
        return cls(**values)


def located(url: str, folder: Path, base64_too: bool = False) -> MediaPlace | bytes:
    """A place, or the bytes themselves of a `data:` URL. Relative paths start at `folder`.

    base64_too: what is no file may be base64, as ERNIEKit takes it.
    """
    if not url.strip():
        raise MediaError("missing_media", "the name of the file is empty")
    if is_data_url(url):
        return from_data_url(url)
    if re.match(r"(?i)(https?|ftp|s3|gs|hdfs):", url):
        raise MediaError("remote", f"{url[:80]}: nothing is downloaded while training; fetch it and give its path")
    if url[:5].lower() == "file:":
        parts = urlparse(url)
        if parts.netloc not in ("", "localhost"):
            raise MediaError("remote", f"{url[:80]}: names another machine ({parts.netloc}); give a path of this one")
        url = unquote(parts.path)
    path = str(folder / url) if not os.path.isabs(url) else url
    if (match := _ARCHIVE.match(path)) and not os.path.isdir(match[1]):
        return MediaPlace(match[1], match[2])
    # No base64 has a dot, and nearly every name of a file that is yet to come.
    if base64_too and len(url) > 64 and "." not in url and not os.path.exists(path):
        return from_base64(url)
    return MediaPlace(path)


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def from_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise MediaError("bad_data_url", f"{url[:40]}...: a data URL has a comma before its content")
    content = from_base64(body) if head.lower().endswith(";base64") else unquote_to_bytes(body)
    if not content:
        raise MediaError("empty_media", "it is empty: there is no data after the comma")
    return content


def from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s+", "", text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("bad_base64", because(f"{text[:24]!r}... is not base64", error)) from None


def read(place: MediaPlace, limits: MediaLimits) -> bytes:
    if place.content:
        if len(place.content) > limits.bytes:
            raise _too_large(place, len(place.content), limits)
        return place.content
    if place.size < 0 and not may_be_read(place.path):  # with a size it is the cache's own file
        raise MediaError("missing_media", f"{place.name}: outside the folders of the page")
    try:
        if place.member:
            return _read_member(place, limits)
        size = place.size if place.size >= 0 else os.stat(place.path).st_size
        if size > limits.bytes:
            raise _too_large(place, size, limits)
        if not os.path.isfile(place.path):
            raise MediaError("missing_media", f"{place.name}: not a plain file")
        if not size:
            raise MediaError("empty_media", f"{place.name}: the file is empty")
        with open(place.path, "rb") as file:
            file.seek(place.start)
            return file.read(size)
    except OSError as error:
        if packed := _NO_SEEK.search(place.path):
            name = place.path[: packed.end() - 1]
            raise MediaError("archive", f"{name}: a compressed tar cannot be read in place; unpack it") from None
        raise MediaError("missing_media", f"{place.name}: {error.strerror or error}") from None
    except ValueError as error:  # a path with a zero byte
        raise MediaError("missing_media", f"{place.name[:200]!r}: {error}") from None


def _too_large(place: MediaPlace, size: int, limits: MediaLimits) -> MediaError:
    return MediaError("too_many_bytes", f"{place.name}: {size:,} bytes, more than media_max_bytes={limits.bytes:,}")


def _read_member(place: MediaPlace, limits: MediaLimits) -> bytes:
    state = os.stat(place.path)
    if not stat.S_ISREG(state.st_mode):
        raise MediaError("missing_media", f"{place.path}: not a plain file")
    try:
        if place.path.lower().endswith(".zip"):
            archive = _zip(place.path, state.st_size, state.st_mtime_ns)
            info = archive.getinfo(place.member)
            if info.file_size > limits.bytes:
                raise _too_large(place, info.file_size, limits)
            with archive.open(info) as file:
                content = file.read(limits.bytes + 1)
            if len(content) > limits.bytes:  # more than its entry declares
                raise _too_large(place, len(content), limits)
            return content
        start, size = _tar(place.path, state.st_size, state.st_mtime_ns)[place.member]
    except KeyError:
        raise MediaError("missing_media", f"{place.name}: no such member") from None
    except _BROKEN as error:
        raise MediaError("archive", because(f"{place.name}: the archive cannot be read", error)) from None
    if size > limits.bytes:
        raise _too_large(place, size, limits)
    with open(place.path, "rb") as file:
        file.seek(start)
        return file.read(size)


@lru_cache(maxsize=64)
def _zip(path: str, size: int, changed: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


@lru_cache(maxsize=64)
def _tar(path: str, size: int, changed: int) -> dict[str, tuple[int, int]]:
    """The offset of each plain file in the archive."""
    with tarfile.open(path, "r:") as archive:
        return {
            name: (member.offset_data, member.size)
            for member in archive
            if member.isreg()
            for name in (member.name, member.name.removeprefix("./"))
        }
