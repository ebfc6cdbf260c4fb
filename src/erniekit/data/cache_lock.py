"""One process at a time makes a cache folder; the others wait, print for which, and give up on one without progress.

Used by token_cache.py, documents.py and index.py around what ranks and runs share.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from erniekit import heartbeat
from erniekit.errors import DataError
from erniekit.log import warn

STALLED_S = 1800.0  # without progress by the holder
FIRST_NOTE_S, NEXT_NOTE_S = 10.0, 60.0  # of waiting until it is printed, and printed again
TOUCH_S = 1.0  # at most so often does the holder show its progress
_POLL_S = 0.1
_SIGN = "pid"


@contextmanager
def only_one(folder: Path) -> Iterator[bool]:
    """Ranks and runs that need the same cache wait for the first to make it. Gives False where files cannot be
    locked: then each makes its own and the first rename wins."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    path = folder.with_name(folder.name + ".lock")
    with open(path, "a+", encoding="utf-8") as lock:
        waiting = _Wait(path, lock)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting.look()
            except OSError:
                yield False
                return
        with _signed(path, lock):
            yield True


@contextmanager
def _signed(path: Path, lock: IO[str]) -> Iterator[None]:
    """Writes into the lock file who holds it, and shows its progress. Not in a file that holds anything else."""
    lock.seek(0)
    if path.is_symlink() or not _is_ours(lock.read(200)):
        yield
        return
    lock.truncate(0)
    lock.write(f"{_SIGN} {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    try:
        with heartbeat.listening(_Shown(lock)):
            yield
    finally:
        lock.truncate(0)


def _is_ours(text: str) -> bool:
    """Nothing, or what a holder that was killed left."""
    return not text or text.startswith(f"{_SIGN} ")


class _Shown:
    """The holder's progress as the lock file's modification time, which waiting processes can read."""

    def __init__(self, lock: IO[str]) -> None:
        self._lock, self._at = lock, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._at >= TOUCH_S:
            self._at = now
            os.utime(self._lock.fileno())


class _Wait:
    def __init__(self, path: Path, lock: IO[str]) -> None:
        self._path, self._lock = path, lock
        self._began = self._moved = time.monotonic()
        self._note_at = self._began + FIRST_NOTE_S
        self._seen = os.fstat(lock.fileno()).st_mtime_ns

    def look(self) -> None:
        """Once a turn. The holder's progress counts as this process's own."""
        now, seen = time.monotonic(), os.fstat(self._lock.fileno()).st_mtime_ns
        if seen != self._seen:
            self._seen, self._moved = seen, now
            heartbeat.beat()
        still = now - self._moved
        if still > STALLED_S:
            raise DataError(
                f"{self._holder()} holds the lock of this cache and has made no progress for {still / 60:.0f} minutes",
                where=str(self._path),
                fix="end that process, or set ERNIEKIT_CACHE to a folder of your own",
            )
        if now >= self._note_at:
            self._note_at = now + NEXT_NOTE_S
            warn(f"waiting: {self._path} is held by {self._holder()}, last progress {still:.0f} s ago")
        time.sleep(_POLL_S)

    def _holder(self) -> str:
        self._lock.seek(0)
        text = self._lock.read(200)
        return text if text and _is_ours(text) else "another process"
