"""Files that outlive a power cut and are checked before use: fsync, size and digest of each, then one rename.

For the caches (token_cache.py, documents.py, index.py, recipes/reference.py) and the fingerprints of mmap_files.py.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from erniekit import heartbeat
from erniekit.log import warn

SEAL = "seal.json"
WHOLE = 64 << 20  # bytes; a larger file is known by SAMPLES blocks from its first byte to its last
SAMPLES, BLOCK = 1024, 64 << 10
_READ = 1 << 20

Record = list[Any]  # [bytes, digest]


def add_content(digest: Any, file: int, start: int, size: int, whole: int) -> None:
    """Bytes [start, start + size) of an open file into a digest: all, or where they are more than `whole`, samples."""
    digest.update(f"{size}\n".encode())
    if size <= max(whole, BLOCK):
        for at in range(start, start + size, _READ):
            digest.update(os.pread(file, min(_READ, start + size - at), at))
            heartbeat.beat()
        return
    for k in range(SAMPLES):
        heartbeat.beat()
        digest.update(os.pread(file, BLOCK, start + (size - BLOCK) * k // (SAMPLES - 1)))


def record(path: Path) -> Record:
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb", buffering=0) as file:
        add_content(digest, file.fileno(), 0, size, WHOLE)
    return [size, digest.hexdigest()]


def records(folder: Path) -> dict[str, Record]:
    """Of every file of a folder, which are on disk for good afterwards."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        sync(path)
    return {path.name: record(path) for path in files}


def intact(folder: Path, files: Mapping[str, Record]) -> bool:
    """Whether these files are there as they were recorded: sizes first, then contents."""
    try:
        if any((folder / name).stat().st_size != size for name, (size, _) in files.items()):
            return False
        return bool(files) and all(record(folder / name) == [*recorded] for name, recorded in files.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def seal(folder: Path) -> None:
    """The records of a folder's files are stored with them."""
    files = records(folder)
    (folder / SEAL).write_text(json.dumps({"files": files}), encoding="utf-8")
    sync(folder / SEAL)


def is_sealed(folder: Path) -> bool:
    """Whether a folder is as `seal` left it."""
    try:
        files = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return intact(folder, files)


def clear(folder: Path, names: Iterable[str]) -> None:
    """Remove a cache folder, so that a new one can be created: its files of these names are deleted. If it also holds
    files that erniekit did not write, the folder is renamed and kept. OSError if the folder is a symbolic link."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a link stands in the place of a cache folder", str(folder))
    for path in (folder / name for name in names):
        if path.is_file() and not path.is_symlink():
            path.unlink()
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError:
        beside = folder.with_name(f"{folder.name}.not-ours-{time.time_ns()}")
        folder.rename(beside)
        warn(f"{beside} holds files that are no part of the cache; they are kept there")


def publish(temporary: Path, folder: Path) -> None:
    """A folder whose files are synced gets its name, for good."""
    sync(temporary)
    temporary.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no fsync for folders
            raise
    finally:
        os.close(file)
