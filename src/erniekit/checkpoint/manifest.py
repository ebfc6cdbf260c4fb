"""MANIFEST.json: size and sha256 of every file of a published folder, and the check of a folder against it.
Written last by writer.py; read by manager.py, published.py, and where a checkpoint's `info` is needed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from erniekit import heartbeat
from erniekit.errors import CheckpointError
from erniekit.files.digest import Digest, is_digest, is_sha256
from erniekit.files.record import is_inside

MANIFEST = "MANIFEST.json"
FORMAT = 1
Depth = Literal["size", "sample", "full"]
Verify = Literal["auto", "full", "size"]  # the key of that name

_FULL_BELOW = 20_000_000_000  # bytes; above, "auto" reads samples: a start should not take minutes
_READ = 1 << 20  # bytes per read while hashing
SAMPLED_ABOVE = 64 << 20  # bytes; smaller files are hashed in full even by a sampled check
_SAMPLE_BLOCKS, _SAMPLE_BLOCK = 64, 64 << 10
_PERMISSIONS = "check the permissions of the file and its folders, then run the same command again"
_TRY_AGAIN = "run the same command again; if it stays so, check the disk (dmesg), the mount and `ulimit -n`"
_MAX_BYTES = 64 << 20  # of the manifest itself: about 400,000 files
# The digest covers the raw bytes before it and the tail is fixed text: no byte of the file can change unseen.
_SEALED = re.compile(rb'(.*),\n "sha256": "([0-9a-f]{64})"\n}\n', re.DOTALL)


class Damaged(CheckpointError):
    """The bytes on disk are not the ones saved: a resume may set the folder aside and go further back."""


class NoManifest(CheckpointError):
    """A folder we did not publish, or whose manifest was deleted: never renamed, replaced or rotated away."""


class Unreadable(CheckpointError):
    """The system could not read a file now. Its bytes may be good, so no checkpoint counts as damaged by it."""


@dataclass(frozen=True)
class FileRecord:
    size: int  # bytes
    sha256: str  # of a file that several ranks wrote at once: see files/digest.py
    sample: str = ""  # sha256 over evenly spaced blocks; only for files too large to read on every start

    def impossible(self) -> str:
        """The name of a value that no writer of ours gives; a manifest may be anyone's."""
        if type(self.size) is not int or self.size < 0:
            return "size"
        if not is_digest(self.sha256):
            return "sha256"
        return "" if self.sample == "" or is_sha256(self.sample) else "sample"


@dataclass(frozen=True)
class Manifest:
    files: dict[str, FileRecord]  # by name relative to the folder, "/" between parts
    info: dict[str, Any]

    @property
    def total_bytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        files = {name: {k: v for k, v in vars(r).items() if v != ""} for name, r in self.files.items()}
        text = json.dumps({"format": FORMAT, "files": files, "info": self.info}, indent=1)
        head = text.removesuffix("\n}").encode()
        return head + b',\n "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Raises ValueError with the reason when the bytes are not a whole, untouched manifest."""
        sealed = _SEALED.fullmatch(raw)
        if sealed is None:
            raise ValueError("does not end with its own sha256: cut short or edited")
        if hashlib.sha256(sealed[1]).hexdigest() != sealed[2].decode():
            raise ValueError("does not match its own sha256: edited or damaged")
        try:
            data = json.loads(raw)
            version, info = data["format"], data["info"]
            files = {str(name): FileRecord(**entry) for name, entry in data["files"].items()}
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"lacks what a manifest holds ({error})") from None
        if version != FORMAT:
            raise CheckpointError(
                f"MANIFEST.json has format {version}; this version reads format {FORMAT}",
                fix="use the erniekit version that wrote this checkpoint",
            )
        for name, record in files.items():
            if wrong := record.impossible() if is_inside(name) else "name":
                raise ValueError(f"has an entry {name[:80]!r} with an invalid {wrong}")
        if not isinstance(info, dict):
            raise ValueError("has no info")
        return cls(files, info)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """A missing file is damage; any other error of the system (a time-out, no file handles, no memory) is not."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Damaged(f"{path.name} is missing", where=str(path))
    if isinstance(error, PermissionError):
        return Unreadable(f"{path.name} may not be read; nothing was changed", where=str(path), fix=_PERMISSIONS)
    reason = error.strerror or str(error)
    return Unreadable(f"{path.name} cannot be read: {reason}; nothing was changed", where=str(path), fix=_TRY_AGAIN)


def kind_of(path: Path, follow: bool = True) -> os.stat_result | None:
    """stat(), None where there is nothing. `Path.exists` and its like take some errors of the system for "no"."""
    try:
        return path.stat(follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def is_folder(path: Path) -> bool:
    found = kind_of(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def has_manifest(folder: Path) -> bool:
    """Whether it has a manifest of ours, sound or damaged; another program's file of that name is none."""
    try:
        load(folder)
    except NoManifest:
        return False
    except Damaged:
        return True
    return True


def unlisted(folder: Path) -> list[str]:
    """Files and links in a published folder that its manifest does not list: added after it was written."""
    listed = {MANIFEST, *load(folder).files}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in found} - listed)


def _is_another_programs(raw: bytes) -> bool:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return not (isinstance(data, dict) and data.keys() & {"files", "format", "sha256"})


def load(folder: Path) -> Manifest:
    """The manifest of a published folder; `Damaged` when it was changed, `NoManifest` where there is none."""
    path = folder / MANIFEST
    if not is_folder(folder):
        raise CheckpointError(f"no checkpoint folder at {folder}", fix="check the path; ls its parent")
    found = kind_of(path)
    if found is None:
        raise NoManifest(
            f"{folder.name} has no {MANIFEST}: another program wrote it, or the file was deleted",
            where=str(folder),
            fix="name a checkpoint that erniekit saved",
        )
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{MANIFEST} is not a plain file", where=str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise Damaged(f"{MANIFEST} is larger than {_MAX_BYTES} bytes", where=str(path))
        return Manifest.from_bytes(raw)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        if _is_another_programs(raw):
            raise NoManifest(
                f"{folder.name} has a {MANIFEST} of another program",
                where=str(folder),
                fix="name a checkpoint that erniekit saved",
            ) from None
        raise Damaged(f"{MANIFEST} {error}", where=str(path)) from None


def depth_of(mode: Verify, size: int) -> Depth:
    """How closely files of `size` bytes in all are looked at."""
    if mode == "auto":
        return "full" if size < _FULL_BELOW else "sample"
    return mode


def check(
    folder: Path,
    depth: Depth = "full",
    content_of: Callable[[str], bool] = lambda name: True,
    only: Callable[[str], bool] = lambda name: True,
) -> Manifest:
    """Compare every file with the manifest; `Damaged` names the first that differs. Sizes go first.

    content_of: the files, by name, whose bytes matter to the caller; of the others only the size is compared. only: the
    files that matter at all.
    """
    manifest = load(folder)
    for name, record in manifest.files.items():
        if not only(name):
            continue
        path = folder / name
        found = kind_of(path, follow=False)
        if found is None:
            raise Damaged(f"{name} is missing", where=str(path))
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is not a plain file", where=str(path))
        if found.st_size != record.size:
            raise Damaged(f"{name} has {found.st_size} bytes, {record.size} were saved", where=str(path))
    if depth != "size":
        for name, record in manifest.files.items():
            if only(name) and content_of(name):
                check_content(folder / name, name, record, depth)
    return manifest


def measure(path: Path, like: str = "") -> FileRecord:
    """Size, digest and, for a large file, the sampled digest: one pass over the file. like: a digest to compare it
    with."""
    digest, size = Digest(like), 0
    buffer = bytearray(_READ)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size += count
            heartbeat.beat()
    return FileRecord(size, digest.text(), sample(path, size))


def sample(path: Path, size: int) -> str:
    """Digest of 64 blocks of 64 KiB from the first byte to the last; "" for files hashed in full anyway."""
    if size <= SAMPLED_ABOVE:
        return ""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for i in range(_SAMPLE_BLOCKS):
            start = (size - _SAMPLE_BLOCK) * i // (_SAMPLE_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _SAMPLE_BLOCK, start))
    return digest.hexdigest()


def check_content(path: Path, name: str, record: FileRecord, depth: Depth) -> None:
    try:
        if depth == "sample" and record.sample:
            same = sample(path, record.size) == record.sample
        else:
            same = measure(path, record.sha256).sha256 == record.sha256
    except OSError as error:
        raise unreadable(path, error) from error
    if not same:
        raise Damaged(f"{name} does not match its sha256", where=str(path))
