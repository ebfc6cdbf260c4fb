"""The ranks' output: each into its workerlog.N, rank 0's onto the screen as well. Used by launch/agent.py.

A rank writes into a pipe, or into a terminal of its own where ours is one, so that its progress bar stays a bar.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import struct
import sys
import termios
import threading
import time
import tty
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from erniekit.files import OwnedFiles

LAUNCHER_LOG = "launcher.log"
SCREEN = {"stdout": 1, "stderr": 2}
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST = 1 << 16  # bytes of a line without an end that are kept before it is written anyway
_SIZE = struct.Struct("HHHH")  # rows, columns and two that are unused


def own_folder(wanted: Path) -> Path:
    """`wanted`, or beside it the first folder whose logs are all ours: another launcher's are never replaced."""
    number = 1
    folder = wanted
    while _foreign_logs(folder):
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    folder.mkdir(parents=True, exist_ok=True)
    OwnedFiles(folder).claim(LAUNCHER_LOG)
    return folder


def _foreign_logs(folder: Path) -> bool:
    names = [path.name for path in folder.glob("workerlog.*")] if folder.is_dir() else []
    return bool(OwnedFiles(folder).in_the_way([*names, LAUNCHER_LOG]))


@dataclass
class _RankOutput:
    """One end of a rank's output that we read."""

    rank: int
    fd: int
    log: BinaryIO
    screen: int | None  # file descriptor that shows it as well
    terminal: bool
    rest: bytes = b""
    others: list[int] = field(default_factory=list)  # the ends the rank opens by path: ours until it is done


class Relay:
    """One thread moves all of it: `open` before a rank starts, `emit` for the launcher's own lines, `close` last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._streams: dict[int, _RankOutput] = {}
        self._select = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._mid_line = self._muted = self._closed = False
        self._opened: dict[int, int] = {}  # rank -> how often: its attempts
        self._thread: threading.Thread | None = None

    def path(self, rank: int) -> Path:
        return self.folder / f"workerlog.{rank}"

    def open(self, rank: int) -> tuple[str, str]:
        """The paths a rank's stdout and stderr are to be opened at."""
        with self._lock:
            log = open(self._fresh(rank), "ab", buffering=0)  # noqa: SIM115 - it lives as long as the rank
            self._muted = False
            if rank != 0:
                path = self._add(rank, log, None, False)
                return path, path
            shown = {name: os.isatty(fd) for name, fd in SCREEN.items()}
            if all(shown.values()):
                path = self._add(rank, log, SCREEN["stdout"], True)
                return path, path
            out, err = (self._add(rank, log, fd, shown[name]) for name, fd in SCREEN.items())
            return out, err

    def emit(self, *lines: str) -> None:
        """Lines of the launcher itself, never in the middle of a rank's line."""
        with self._lock:
            sys.stderr.write(("\n" if self._mid_line else "") + "\n".join(lines) + "\n")
            sys.stderr.flush()
            self._mid_line = False

    def note(self, rank: int, *lines: str) -> None:
        """Into the rank's log only."""
        with contextlib.suppress(OSError), open(self.path(rank), "a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")

    def mute(self) -> None:
        """From here on the ranks only report that one of them is gone: into the logs, not onto the screen."""
        with self._lock:
            self._muted = True

    def catch_up(self, seconds: float = 1.0) -> None:
        """Take in what the ranks have written so far."""
        until = time.monotonic() + seconds
        while self._turn(0.02) and time.monotonic() < until:
            pass

    def release(self) -> None:
        """The ranks are gone: whatever they left in the pipes goes to its place, then everything is closed."""
        self.catch_up()
        with self._lock:
            for stream in list(self._streams.values()):
                self._drop(stream)

    def close(self) -> None:
        self._closed = True
        if self._thread:
            self._thread.join()
        self.release()

    # --- files

    def _fresh(self, rank: int) -> Path:
        """The last run's log is kept as .1, those of this run's earlier attempts as .attempt-K."""
        path, owned = self.path(rank), OwnedFiles(self.folder)
        attempts = self._opened.get(rank, 0)
        if not attempts:
            for old in self.folder.glob(f"{path.name}.attempt-*"):
                owned.remove(old.name)
        kept = Path(f"{path}.attempt-{attempts}" if attempts else f"{path}.1")
        owned.claim(path.name, *([kept.name] if os.path.lexists(path) else []))
        if path.exists():
            path.replace(kept)
        self._opened[rank] = attempts + 1
        return path

    # --- pipes and terminals

    def _add(self, rank: int, log: BinaryIO, screen: int | None, terminal: bool) -> str:
        ours, theirs, path = _own_terminal() if terminal else (-1, -1, "")
        if not path:
            terminal = False
            ours, theirs = os.pipe()
            path = f"/dev/fd/{theirs}"
        os.set_blocking(ours, False)
        stream = _RankOutput(rank, ours, log, screen, terminal, others=[theirs])
        self._streams[ours] = stream
        self._select.register(ours, selectors.EVENT_READ, stream)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rank-logs", daemon=True)
            self._thread.start()
        return path

    def _drop(self, stream: _RankOutput) -> None:
        self._log(stream, b"", last=True)
        self._select.unregister(stream.fd)
        del self._streams[stream.fd]
        for fd in (stream.fd, *stream.others):
            os.close(fd)
        if not any(s.log is stream.log for s in self._streams.values()):
            stream.log.close()

    # --- moving

    def _run(self) -> None:
        while not self._closed:
            if not self._turn(0.2):
                self._follow_window()

    def _turn(self, wait: float) -> bool:
        """Move what is there; False when nothing came within `wait` seconds."""
        came = False
        if not self._streams:
            time.sleep(wait)
            return False
        for key, _ in self._select.select(wait):
            with self._lock:
                stream: _RankOutput = key.data
                if stream.fd in self._streams and self._streams[stream.fd] is stream:
                    came = self._move(stream) or came
        return came

    def _move(self, stream: _RankOutput) -> bool:
        try:
            data = os.read(stream.fd, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # a terminal whose last writer left
            data = b""
        if not data:
            return False
        if stream.screen is not None and not self._muted:
            _write_all(stream.screen, data)
            self._mid_line = not data.endswith(b"\n")
        self._log(stream, data)
        return True

    def _log(self, stream: _RankOutput, data: bytes, last: bool = False) -> None:
        """Whole lines, without colours; of a line that was drawn over again and again, the last state."""
        text = stream.rest + data
        lines, end, stream.rest = text.rpartition(b"\n")
        if last or len(stream.rest) > _LONGEST:
            lines, end, stream.rest = text, b"\n" if text and not text.endswith(b"\n") else b"", b""
        whole = lines + end
        if whole:
            kept = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n"))
            with contextlib.suppress(OSError, ValueError):  # a full disk must not stop the ranks
                stream.log.write(_COLOUR.sub(b"", kept))

    def _follow_window(self) -> None:
        with self._lock:
            for stream in self._streams.values():
                if stream.terminal and stream.screen is not None:
                    _copy_size(stream.screen, stream.fd)


def _own_terminal() -> tuple[int, int, str]:
    """A terminal for the rank: our end, its end, and the path it is opened at; no path where there are none."""
    try:
        ours, theirs = os.openpty()
        tty.setraw(theirs)  # what the rank writes reaches us byte for byte
        _copy_size(SCREEN["stderr"] if os.isatty(SCREEN["stderr"]) else SCREEN["stdout"], ours)
        return ours, theirs, os.ttyname(theirs)
    except OSError:
        return -1, -1, ""


def _copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(_SIZE.size))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed screen (`| head`) must not stop the ranks
        while data:
            data = data[os.write(fd, data) :]
