"""Samples of a source that is still being read, on disk: one process appends, all that share the folder read.

Used by stream_source.py. Only bytes that state.json counts are valid: it is replaced after every append, so a process
that was killed leaves whole samples, and the next one appends after them.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import IO, Any

import numpy as np

from erniekit import heartbeat
from erniekit.data.tokenise import BAD_ROWS, IDS, LABELS
from erniekit.errors import DataError
from erniekit.files.part_file import part_file
from erniekit.files.unwritable import way_out

ENDS, KEYS = "ends.bin", "keys.bin"  # int64 [samples]: tokens up to its end; uint64 [rows, 2]: line, quality.py's key
PARTS_OF = "parts.bin"  # preference.PARTS [samples], of pairs
FILES = (IDS, LABELS, ENDS, KEYS, PARTS_OF, BAD_ROWS)
STATE, CLAIMED, LOCK = "state.json", "state.claimed.json", "lock"
_READ = 1 << 20
# A link of such a name is not ours: what it points to must not be written.
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


@dataclass
class StreamState:
    """How far a source has been read."""

    samples: int = 0
    tokens: int = 0
    file: int = 0  # of the source's files, the one being read
    taken: int = 0  # rows of that file
    taken_check: int = 0  # crc32 of them
    place: tuple[int, int] | None = None  # behind them, as RowPlace, where its source can be read from there on
    ended: bool = False
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES, 0))  # bytes that count
    checks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES, 0))  # crc32 of them
    report: dict[str, Any] = field(default_factory=dict)


class StreamStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None
        self._open = RLock()  # a loader's thread must not meet files that are just being closed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: os.open(folder / name, _OPEN, 0o666) for name in FILES}
        except OSError as error:
            raise self._unwritable(error) from error
        self.progress = StreamState()

    @property
    def writes(self) -> bool:
        return self._lock is not None

    def take_over(self) -> bool:
        """Become the process that appends, if there is none. What is there already is checked first."""
        try:
            import fcntl

            lock = open(self.folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held until close
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
            self._claim()
        except (ImportError, OSError) as error:
            raise DataError(
                f"streaming needs a cache whose files can be locked and written: {error}",
                where=str(self.folder),
                fix="set cache_dir to a folder on another disk, or streaming: False",
            ) from error
        return True

    def look(self) -> StreamState:
        """What counts now."""
        if not self.writes:
            self.progress = _read(self.folder / STATE) or self.progress
        return self.progress

    def append(self, parts: dict[str, bytes], after: StreamState) -> None:
        """after: the progress with these parts of the files; their sizes and checks are filled in."""
        try:
            with self._open:
                self._append(parts, after)
        except OSError as error:
            raise self._unwritable(error) from error

    def _append(self, parts: dict[str, bytes], after: StreamState) -> None:
        for name, data in parts.items():
            after.sizes[name] += _write(self._files[name], data, after.sizes[name])
            after.checks[name] = zlib.crc32(data, after.checks[name])
        self._commit(after)

    def read(self, name: str, dtype: Any, start: int, count: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        with self._open:
            data = os.pread(self._files[name], count * size, start * size)
        if len(data) != count * size:
            raise DataError("the cache was changed while in use", where=str(self.folder), fix="start again")
        return np.frombuffer(data, dtype)

    def text(self, name: str) -> str:
        with self._open:
            return os.pread(self._files[name], self.look().sizes[name], 0).decode("utf-8")

    def discard(self) -> None:
        """Removes the files, by the process that wrote them; processes that have them open can still read."""
        if self.writes:
            for name in (*FILES, STATE, LOCK):  # a process that is killed here leaves no samples without their state
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # another's file is in it
                self.folder.rmdir()

    def close(self) -> None:
        with self._open:
            for file in self._files.values():
                os.close(file)
            self._files = {}
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _claim(self) -> None:
        """Verify the stored samples. Until that is done there is no state.json, so that no other process reads them."""
        state, claimed = self.folder / STATE, self.folder / CLAIMED
        if state.exists():
            os.replace(state, claimed)
        elif not claimed.exists() and any(os.fstat(file).st_size for file in self._files.values()):
            raise DataError(
                "this folder of the cache holds files that no run of erniekit wrote",
                where=str(self.folder),
                fix="remove the folder if nothing in it is needed, or set cache_dir to another one",
            )
        found = _read(claimed)
        self._commit(found if found is not None and self._whole(found) else StreamState())
        claimed.unlink(missing_ok=True)
        for name, file in self._files.items():
            os.ftruncate(file, self.progress.sizes[name])

    def _whole(self, progress: StreamState) -> bool:
        for name, file in self._files.items():
            size, check = progress.sizes[name], 0
            for at in range(0, size, _READ):
                check = zlib.crc32(os.pread(file, min(_READ, size - at), at), check)
                heartbeat.beat()
            if os.fstat(file).st_size < size or check != progress.checks[name]:
                return False
        return True

    def _commit(self, progress: StreamState) -> None:
        with part_file(self.folder / STATE) as out:  # not synced: what a power failure damages is read again
            out.write(json.dumps(asdict(progress)))
        self.progress = progress

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"the cache of streamed samples cannot be written: {error}",
            where=str(self.folder),
            fix=f"{way_out(error)}, or set ERNIEKIT_CACHE to a folder on another disk",
        )


def _read(path: Path) -> StreamState | None:
    try:
        found = StreamState(**json.loads(path.read_text(encoding="utf-8")))
        return found if set(found.sizes) == set(found.checks) == set(FILES) else None
    except (OSError, ValueError, TypeError):
        return None


def _write(file: int, data: bytes, at: int) -> int:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
    return len(data)
