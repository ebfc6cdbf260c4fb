"""`.erniekit-files`: the names of the files erniekit created in a folder, and the digests of those that never change.

A name is appended before its file is created, so a kill leaves no file of ours unlisted. Only listed files are ever
replaced or deleted; a symbolic link is never ours.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from erniekit.errors import ErnieKitError
from erniekit.files.digest import Digest

RECORD = ".erniekit-files"
FORMAT = 1
_MAX_BYTES = 64 << 20  # of the record; far more than any folder needs
_READ = 1 << 20
_LONGEST, _LONGEST_PART = 1024, 255  # bytes of a name, and of a part of one: systems take no more, with the folder's


class NotOurs(ErnieKitError):
    """A file or folder in the way that erniekit did not write."""


class Content(NamedTuple):
    size: int  # bytes
    sha256: str
    mtime_ns: int = -1  # with the same size and time it is not read again
    sample: str = ""  # of a large file, the digest of some of its blocks (checkpoint/manifest.py)


@dataclass
class RecordEntry:
    """`digests` empty: a file that is rewritten as the work goes on. Otherwise the contents written under this name:
    two while one replaces the other, so that a kill between the two leaves either recognised."""

    use: str = ""  # what the file belongs to, such as "model"
    digests: list[Content] = field(default_factory=list)


class OwnedFiles:
    """The record of one folder. Reading never writes; `claim` creates the record where there is none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RECORD

    @property
    def exists(self) -> bool:
        return _is_plain_file(self.path)

    @property
    def emptied(self) -> bool:
        """Whether it is there and says nothing: it is written with its first line, so it was damaged since."""
        return self.exists and next(self._lines(), None) is None

    def purpose(self) -> str:
        """What the folder was created for ("run", "demo", "job"); empty for a folder that is not ours as a whole."""
        return next((str(line["folder"]) for line in self._lines() if "folder" in line), "")

    def entries(self) -> dict[str, RecordEntry]:
        found: dict[str, RecordEntry] = {}
        for line in self._lines():
            name = line.get("name")
            if not isinstance(name, str) or not is_inside(name):
                continue
            if line.get("removed"):
                found.pop(name, None)
                continue
            entry = found.setdefault(name, RecordEntry(str(line.get("use", ""))))
            if line.get("open"):
                entry.digests.clear()
            if "sha256" in line:  # without a size nothing matches it
                size, time, sample = line.get("size"), line.get("mtime_ns"), str(line.get("sample", ""))
                content = Content(size if isinstance(size, int) else -1, str(line["sha256"]), sample=sample)
                entry.digests.append(content._replace(mtime_ns=time) if isinstance(time, int) else content)
        return found

    def is_ours(self, name: str, entries: Mapping[str, RecordEntry] | None = None) -> bool:
        """Whether the file of this name is a plain file that we created and, where its content is recorded, that
        content."""
        entry = (self.entries() if entries is None else entries).get(name)
        if entry is None or not _is_plain_file(self.folder / name):
            return False
        return not entry.digests or _has_content(self.folder / name, entry.digests)

    def in_the_way(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that exist and are not ours."""
        entries = self.entries()
        return [n for n in names if os.path.lexists(self.folder / n) and not self.is_ours(n, entries)]

    def open(self, purpose: str) -> OwnedFiles:
        """Create the folder and its record, where they are missing. Call it once the folder was checked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.purpose():
            self._append([{"erniekit": FORMAT, "folder": purpose}])
        return self

    def claim(self, *names: str) -> None:
        """Record files that are about to be created or rewritten; refused where one exists that is not ours."""
        self.refuse(names)
        recorded = self.entries()
        self._append([{"name": name, "open": True} for name in names if name not in recorded or recorded[name].digests])

    def settle(self, *names: str) -> None:
        """Record the final content: from here on a file of that name with other content is not ours."""
        self._append([{"name": name, **content_of(self.folder / name)._asdict()} for name in names])

    def claim_content(self, contents: Mapping[str, Content], use: str) -> None:
        """The same for files whose content is fixed."""
        self.refuse(list(contents))
        recorded = self.entries()
        lines = [
            {"name": name, "use": use, **content._asdict()}
            for name, content in contents.items()
            if name not in recorded or content not in recorded[name].digests
        ]
        self._append(lines)

    def announce(self, names: Sequence[str]) -> None:
        """Record files that will be created in a folder that was just made."""
        self._append([{"name": name, "open": True} for name in names])

    def remove(self, name: str) -> bool:
        """Delete a file of ours; False where it is not, and it stays."""
        if not self.is_ours(name):
            return False
        (self.folder / name).unlink()
        self.forget(name)
        return True

    def forget(self, *names: str) -> None:
        self._append([{"name": name, "removed": True} for name in names])

    def refuse(self, names: Sequence[str]) -> None:
        """Raises where one of `names` is in the way: also for a look before the work whose result it would be."""
        if blocked := self.in_the_way(names):
            raise NotOurs(
                f"{some(blocked)} exists and was not written by erniekit, or was changed since, and would be replaced",
                where=str(self.folder),
                fix="move it away, or choose another folder",
            )

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Lines torn by a kill are passed over: the file of such a line was not created yet."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            raw = file.read(_MAX_BYTES)
        for text in raw.splitlines():
            try:
                line = json.loads(text.decode("utf-8", errors="surrogateescape"))  # as it was written
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o644)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, f"{RECORD} is not a plain file")
            if found.st_nlink > 1:  # of a backup made of hard links: that one stays as it is
                fd = self._apart(fd, flags)
            # The first newline ends a line that a kill cut short.
            text = "\n" + "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            os.write(fd, text.encode("utf-8", errors="surrogateescape"))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _apart(self, fd: int, flags: int) -> int:
        """The record as a file of its own, opened; the one that was shared is closed."""
        part = self.path.with_name(f"{RECORD}.{os.getpid()}.part")
        part.write_bytes(os.pread(fd, _MAX_BYTES, 0))
        os.replace(part, self.path)
        os.close(fd)
        return os.open(self.path, flags)


def own(path: Path) -> Path:
    """`path`, once its folder's record lists it: call it before creating or rewriting a file."""
    OwnedFiles(path.parent).claim(path.name)
    return path


def settle(path: Path) -> Path:
    """`path`, once its folder's record has its content: call it when the file will not be written any more."""
    OwnedFiles(path.parent).settle(path.name)
    return path


def some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def content_of(path: Path, like: str = "") -> Content:
    """like: a digest to compare it with (digest.py)."""
    digest, size = Digest(like), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ):
            digest.update(block)
            size += len(block)
    return Content(size, digest.text(), path.stat().st_mtime_ns)


def _has_content(path: Path, digests: Sequence[Content]) -> bool:
    found = path.stat()
    alike = [content for content in digests if content.size == found.st_size]
    if any(content.mtime_ns == found.st_mtime_ns for content in alike):
        return True
    return has_digest(path, {content.sha256 for content in alike})


def has_digest(path: Path, digests: Iterable[str]) -> bool:
    """Whether it is one of these; the file is read once for each form that they have."""
    by_form: dict[str, set[str]] = {}
    for digest in digests:
        by_form.setdefault(digest.rpartition(":")[0], set()).add(digest)
    return any(content_of(path, next(iter(alike))).sha256 in alike for alike in by_form.values())


def is_inside(name: str) -> bool:
    """Whether it names something in a folder, as a system can have it: a list of files may be anyone's."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    try:
        return len(name) <= _LONGEST and all(len(os.fsencode(part)) <= _LONGEST_PART for part in path.parts)
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def _is_plain_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
