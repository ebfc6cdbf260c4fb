"""One trainer per output folder: an OS lock, and a record of the process that holds it.
Taken by manager.py when a run starts; a lock left by a dead process is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.files.unwritable import way_out
from erniekit.log import emit
from erniekit.process_stat import BOOT_ID, START_TICKS, folder_of, has_ended, stat_fields

LOCK = ".erniekit.lock"
_TRIES = 20  # a lock file can be replaced between our open and our flock; each replacement costs one try

# A forked data worker must not keep the lock of a trainer that was killed: it closes its copy at birth.
_open_fds: set[int] = set()


def _close_inherited() -> None:
    for fd in _open_fds:
        os.close(fd)
    _open_fds.clear()


os.register_at_fork(after_in_child=_close_inherited)


@dataclass(frozen=True)
class Holder:
    pid: int
    started: str  # of the process, in clock ticks since boot: distinguishes a recycled pid from the old one
    host: str
    boot: str  # a new one at every boot of the machine
    namespace: str  # of pids: two containers can share a host name and see different processes

    @classmethod
    def me(cls) -> Holder:
        return cls(os.getpid(), process_start(os.getpid()), socket.gethostname(), boot_id(), pid_namespace())

    def is_visible(self) -> bool:
        """Whether its pid means the same process to us as to it."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), boot_id(), pid_namespace())

    def is_dead(self) -> bool:
        return self.is_visible() and process_start(self.pid) not in (self.started, "unknown")

    def is_from_before_boot(self) -> bool:
        return self.host == socket.gethostname() and self.boot != boot_id()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class RunLock:
    def __init__(self, folder: Path, name: str = LOCK, work: str = "another run is training into this folder") -> None:
        """`work`: what the holder is doing, for the error message."""
        self.path, self._work = Path(folder) / name, work
        self._fd = -1
        self._owner = 0  # the process that took it; a fork of it does not hold it

    @property
    def held(self) -> bool:
        return self._fd >= 0 and self._owner == os.getpid()

    def acquire(self) -> RunLock:
        if self.held:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(_TRIES):
                if self._try_once():
                    return self
        except OSError as error:
            raise CheckpointError(
                f"nothing can be written into the folder: {error.strerror or error}",
                where=str(self.path.parent),
                fix=f"{way_out(error)}, or choose another output_dir",
            ) from error
        raise self._refusal(None)

    def release(self) -> None:
        if not self.held:
            return
        fd, self._fd = self._fd, -1
        try:
            if _is_file_at(fd, self.path):
                self.path.unlink()
        except OSError:  # a folder that can no longer be written: the failed save reports it, and the OS lock ends
            pass
        finally:
            _open_fds.discard(fd)
            os.close(fd)

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _try_once(self) -> bool:
        """True: held; False: the file was replaced under us, try again; raises when someone holds it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if _is_foreign(fd):
                raise CheckpointError(
                    f"{self.path.name} is not a lock that erniekit wrote",
                    where=str(self.path),
                    fix="move it away, or choose another folder",
                )
            locked, holder = _flock(fd), _read(fd)
            if locked:  # free by the OS; a live holder then means a disk whose flock does nothing
                stale = holder is None or holder.is_dead() or not holder.is_visible()
            elif locked is False:  # a child of a dead trainer may keep it; anything less certain is alive
                stale = holder is not None and holder.is_dead()
            else:  # a disk without flock: only the record decides
                stale = holder is None or holder.is_dead() or holder.is_from_before_boot()
            if not stale:
                raise self._refusal(holder)
            if not _is_file_at(fd, self.path):
                return False
            if locked is False:
                self.path.unlink()
                return False
            if holder is not None:
                emit(f"took over {self.path.name}: its holder ({holder}) is gone")
            _write(fd, Holder.me())
            self._fd, self._owner = fd, os.getpid()
            _open_fds.add(fd)
            return True
        finally:
            if self._fd != fd:
                os.close(fd)

    def _refusal(self, holder: Holder | None) -> CheckpointError:
        name = "another process" if holder is None else str(holder)
        return CheckpointError(
            f"{self._work}: {name}",
            where=str(self.path.parent),
            fix=f"choose another output_dir, or stop that run; if it is surely over, delete {self.path}",
        )


def boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return ""


def pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """When process `pid` started, as an opaque text; "none" when it has ended, "unknown" when hidden from us."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "none"
    except PermissionError:  # it exists and belongs to someone else
        pass
    try:
        fields = stat_fields(folder_of(pid))
    except OSError:
        return "unknown"
    return "none" if has_ended(fields) else fields[START_TICKS]  # a zombie holds nothing any more


def _flock(fd: int) -> bool | None:
    """True: ours; False: someone else's; None: this file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            return None
        raise


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _is_foreign(fd: int) -> bool:
    """A file with another name as well, or with content that no holder wrote, whole or in part."""
    head = os.pread(fd, 8, 0)
    found = os.fstat(fd)
    return found.st_nlink > 1 or not stat.S_ISREG(found.st_mode) or not b'{"pid": '.startswith(head)


def _read(fd: int) -> Holder | None:
    """None when there is no record, or only a part of one (its writer was killed, or is about to finish)."""
    try:
        return Holder(**json.loads(os.pread(fd, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _write(fd: int, holder: Holder) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)
    os.fsync(fd)
