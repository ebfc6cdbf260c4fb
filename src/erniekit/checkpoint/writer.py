"""Publish a folder whole or not at all: hidden folder, fsync, manifest last, one rename.
Called by manager.py for training checkpoints, and by export for its results."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from erniekit import heartbeat
from erniekit.checkpoint.manifest import MANIFEST, FileRecord, Manifest, measure, sample
from erniekit.errors import CheckpointError
from erniekit.files.digest import Digest
from erniekit.log import warn

# A writer fills the folder; files it hashed while writing and returns the records of are not read again.
Write = Callable[[Path], Mapping[str, FileRecord] | None]

_SYNC_EVERY = 64 << 20  # bytes
_PIECE = 4 << 20  # bytes that are written and hashed at a time
_HASHED_LATER = 8  # pieces: a slow write does not hold up the hash, nor a slow hash the next write
_SYNC = getattr(os, "fdatasync", os.fsync)  # macOS has the latter only
_HIDDEN = re.compile(r"\.(?P<kind>tmp|del|old)-(?P<name>.+)-\d+-[0-9a-f]{8}", re.DOTALL)  # a name may hold line breaks


class FileOps:
    """Every change the checkpoint code makes to a disk, one system call each: one place to trace them."""

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """As any new file is made: a server may run as another user. Its mode is the system's to cut: a process has one
        umask, and reading it is changing it, which threads that write at once would do to each other."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def open(self, path: Path) -> int:
        """A file that is there, to write into it."""
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def extend(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def write_at(self, fd: int, data: memoryview, start: int) -> int:
        return os.pwrite(fd, data, start)

    def sync(self, path: Path) -> None:
        """fsync of a file or a folder."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no fsync for folders
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


ops = FileOps()


def publish(
    parent: Path,
    name: str,
    write: Write,
    *,
    info: dict[str, Any] | None = None,
    expected_bytes: int = 0,
    may_replace: Callable[[Path], None] = lambda target: None,
) -> Path:
    """`parent/name` with what `write(folder)` put into it; on any failure what was there before stays.

    may_replace: called with the target right before the swap; raises where what is there must not go.
    """
    require_space(parent, name, expected_bytes)
    tmp = hidden(parent, "tmp", name)
    try:
        ops.mkdir(tmp)
        with _remembering() as written:
            records = write(tmp) or {}
        _seal(tmp, records, written, info or {})
        may_replace(parent / name)
        _swap_in(tmp, parent / name)
    except (OSError, SafetensorError) as error:
        raise not_written(parent / name, error) from error
    finally:
        _remove_quietly(tmp)
    return parent / name


def write_file(path: Path, chunks: Iterable[bytes | memoryview], like: str = "") -> FileRecord:
    """Write a new file in pieces and hash it meanwhile; `publish` does not read it again. like: a digest that its own
    is compared with."""
    digest = Digest(like)
    views = ((digest, view) for view in _pieces(chunks))
    size = _pour(ops.create(path), views, lambda fd, view: ops.write(fd, view))
    record = FileRecord(size, digest.text())
    remember(path, record)
    return record


def write_stretches(path: Path, stretches: Iterable[tuple[int, Iterable[memoryview]]]) -> list[bytes]:
    """Stretches, each from its start on, into a file that is there, hashed meanwhile: the sha256 of each. What was
    written is on disk for good when this returns."""
    digests: list[Any] = []
    at = 0

    def views() -> Iterator[tuple[Any, memoryview]]:
        nonlocal at
        for start, chunks in stretches:
            digests.append(hashlib.sha256())
            at = start
            yield from ((digests[-1], view) for view in _pieces(chunks))

    def write(fd: int, view: memoryview) -> int:
        nonlocal at
        count = ops.write_at(fd, view, at)
        at += count
        return count

    _pour(ops.open(path), views(), write)
    ops.sync(path)  # by who wrote it: another machine's fsync does not reach this one's memory
    return [digest.digest() for digest in digests]


def _pour(fd: int, views: Iterable[tuple[Any, memoryview]], write: Callable[[int, memoryview], int]) -> int:
    """Each view through `write` and into its digest, both at once; closes the file. Bytes in all."""
    size, unsynced = 0, 0
    try:
        # One thread each: pieces are hashed in their order.
        with ThreadPoolExecutor(1, "checkpoint-hash") as hasher, ThreadPoolExecutor(1, "checkpoint-sync") as syncer:
            hashed: deque[Future[Any]] = deque()
            synced: Future[Any] = syncer.submit(bool)
            for digest, view in views:
                hashed.append(hasher.submit(digest.update, view))
                size, unsynced = size + len(view), unsynced + len(view)
                while len(view):
                    view = view[write(fd, view) :]
                if len(hashed) > _HASHED_LATER:
                    hashed.popleft().result()
                if unsynced >= _SYNC_EVERY and synced.done():  # the disk is at work from the first bytes on
                    synced.result()
                    synced, unsynced = syncer.submit(_SYNC, fd), 0
                heartbeat.beat()
            for each in (*hashed, synced):
                each.result()
    finally:
        os.close(fd)
    return size


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """No larger than _PIECE: what waits for its hash is held in memory."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


def remember(path: Path, record: FileRecord) -> None:
    """A file that was hashed when written, here or by another rank: a publication under way does not read it again."""
    stat = path.stat()
    for found in _remembered:
        found[stat.st_dev, stat.st_ino] = (stat.st_mtime_ns, record)


# (device, inode) -> when last written, and the record: of files that `write_file` wrote during a publication.
Written = dict[tuple[int, int], tuple[int, FileRecord]]
_remembered: list[Written] = []


@contextlib.contextmanager
def _remembering() -> Iterator[Written]:
    """What is written inside is known by its inode: a file may be renamed, and one that was changed since is read."""
    written: Written = {}
    _remembered.append(written)
    try:
        yield written
    finally:
        _remembered.remove(written)


def require_space(parent: Path, name: str, expected_bytes: int) -> None:
    """Stop before the first byte when the disk cannot hold `expected_bytes` and a tenth more."""
    if expected_bytes <= 0:
        return
    needed = expected_bytes * 11 // 10
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise not_written(parent / name, error) from error
    if free < needed:
        raise CheckpointError(
            f"{name} needs {needed / 1e9:.3g} GB (a tenth to spare); the disk has {free / 1e9:.3g} GB free",
            where=str(parent),
            fix="free space there, or choose another folder; of checkpoints, keep fewer (save_total_limit)",
        )


def discard(path: Path) -> None:
    """Delete a published folder: first out of sight by a rename, so that a kill never leaves half of it."""
    out_of_sight = hidden(path.parent, "del", path.name)
    ops.rename(path, out_of_sight)
    ops.sync(path.parent)
    remove_tree(out_of_sight)


def sweep(parent: Path, names: str) -> None:
    """Clear what a killed process left of folders named like `names` ("checkpoint-*"), under the lock."""
    for path in sorted(parent.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not fnmatch.fnmatch(match["name"], names):
            continue
        if match["kind"] == "old" and _is_free(parent / match["name"]):
            ops.rename(path, parent / match["name"])  # killed between the two renames of _swap_in
        else:
            _remove_quietly(path)


def _is_free(path: Path) -> bool:
    """Nothing is there, or a folder with nothing in it, which a rename replaces."""
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))


def hidden(parent: Path, kind: str, name: str) -> Path:
    return parent / f".{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def working_name(stem: str, number: int) -> str:
    """Of a shard until the number of shards is known; a kill leaves it."""
    return f".{stem}-part-{number}.safetensors"


def remove_tree(folder: Path) -> None:
    """Links are removed and never followed, the folder itself among them."""
    if folder.is_symlink():
        ops.unlink(folder)
        return
    for root, folders, files in os.walk(folder, topdown=False):
        for name in files:
            ops.unlink(Path(root, name))
        for name in folders:
            path = Path(root, name)
            (ops.unlink if path.is_symlink() else ops.rmdir)(path)
    ops.rmdir(folder)


def _seal(folder: Path, handed: Mapping[str, FileRecord], written: Written, info: dict[str, Any]) -> None:
    """Hash what was not hashed when written, fsync every file, then the manifest, then the folders: after this a
    rename publishes."""
    records, folders = {}, [folder]
    for path in sorted(_walk(folder)):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            folders.append(path)
            continue
        record = handed.get(name) or _unchanged(path, written)
        records[name] = _completed(path, record) if record else measure(path)
        ops.sync(path)
        heartbeat.beat()
    if not records or set(handed) - set(records):
        raise CheckpointError(f"files announced but not written: {sorted(set(handed) - set(records)) or 'any'}")
    write_file(folder / MANIFEST, [Manifest(records, info).to_bytes()])
    ops.sync(folder / MANIFEST)
    for path in reversed(folders):
        ops.sync(path)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path.name} is a link or a device; a checkpoint holds plain files only")
        yield path


def _unchanged(path: Path, written: Written) -> FileRecord | None:
    """The record of a file that has not changed since `write_file` wrote it; None: it has, or is not one of those."""
    stat = path.stat()
    mtime, record = written.get((stat.st_dev, stat.st_ino), (None, None))
    return record if record is not None and (mtime, record.size) == (stat.st_mtime_ns, stat.st_size) else None


def _completed(path: Path, record: FileRecord) -> FileRecord:
    if path.stat().st_size != record.size:
        raise CheckpointError(f"{path.name} has {path.stat().st_size} bytes, {record.size} were written")
    return FileRecord(record.size, record.sha256, record.sample or sample(path, record.size))


def _swap_in(tmp: Path, final: Path) -> None:
    aside = hidden(final.parent, "old", final.name) if os.path.lexists(final) else None
    if aside is not None:
        ops.rename(final, aside)
    try:
        ops.rename(tmp, final)
    except BaseException:
        if aside is not None:
            ops.rename(aside, final)
        raise
    ops.sync(final.parent)
    if aside is not None:
        _remove_quietly(aside)


def _remove_quietly(folder: Path) -> None:
    """A leftover costs disk space only and the next start sweeps it: no reason to fail a save or a start."""
    if not os.path.lexists(folder):
        return
    try:
        remove_tree(folder)
    except OSError as error:
        warn(f"could not remove {folder}: {error.strerror or error}")


def not_written(path: Path, error: Exception) -> CheckpointError:
    """path: of what is published, or of the hidden folder it is made in."""
    if made := _HIDDEN.fullmatch(path.name):
        path = path.with_name(made["name"])
    if isinstance(error, OSError):
        code, reason = error.errno, error.strerror or str(error)
    else:  # safetensors names the cause in its text only
        found = re.search(r"\(os error (\d+)\)", str(error))
        code, reason = int(found[1]) if found else None, str(error)
    if code == errno.EFBIG:
        fix = "raise the limit on a file's size (ulimit -f), or choose an output_dir whose disk has none as small"
    elif code in (errno.ENOSPC, errno.EDQUOT):
        fix = "free space on that disk; nothing that was saved before has been touched"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "make the folder writable, or choose another output_dir"
    elif code == errno.ENOENT:
        fix = "the folder was removed or its disk unmounted: bring it back, or choose another output_dir"
    else:
        fix = "check the disk (dmesg); nothing that was saved before has been touched"
    return CheckpointError(f"{path.name} was not written: {reason}", where=str(path.parent), fix=fix)


class AsyncSaver:
    """Runs one save at a time parallel to training. Its error waits for the next `check()` or `wait()`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """`job` must work on copies in host memory: training changes the originals meanwhile."""
        self.wait()
        # not a daemon: an interpreter that exits normally finishes the save first
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-save")
        self._thread.start()

    def check(self) -> None:
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        if self._thread is not None:
            heartbeat.join(self._thread)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
