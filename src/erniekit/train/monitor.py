"""Watches one rank from outside: a held interpreter lock stops every Python thread of the rank, but not this process.

Started by train/watchdog.py as `python -I -S monitor.py`; only the standard library, so that it starts at once.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

SIZE = mmap.PAGESIZE
# The watchdog thread acts first; the monitor only when it did not, so many seconds later.
LATE_SOFT_S, LATE_HARD_S = 0.5, 2.0
WRITER_S = 10  # a dead file system may take the process that writes the report, never the one that kills


class Beat(NamedTuple):
    at: float = 0.0  # monotonic seconds of the last sign of progress; one clock for all processes of a machine
    soft: float = float("inf")  # seconds of silence before stacks are written
    hard: float = float("inf")  # seconds of silence before the process ends
    step: int = 0
    phase: str = ""


class SharedHeartbeat:
    """Memory shared by the training thread, which writes its beat, and the two that watch it."""

    _BEAT = struct.Struct("=dddq32s")  # at 0: the training thread's, and behind it its checksum
    _CHECK = struct.Struct("=I")
    _REPORTED = struct.Struct("=dq")  # at 128: the watchdog thread's: the beat it reported, its kernel thread id
    _READY = struct.Struct("=q")  # at 256: the monitor's process id, once it watches

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._last = Beat()

    def beat(self, at: float, soft: float, hard: float, step: int, phase: str) -> None:
        raw = self._BEAT.pack(at, soft, hard, step, phase.encode()[:32])
        self._put(0, raw + self._CHECK.pack(zlib.crc32(raw)))

    def read(self) -> Beat:
        """The last that is whole. One caught in the middle, by another process, is not: half of it may be the beat
        before, or zeros, which would look like silence since the machine started."""
        size = self._BEAT.size
        both = self._map[: size + self._CHECK.size]
        raw = both[:size]
        if self._CHECK.pack(zlib.crc32(raw)) == both[size:]:
            at, soft, hard, step, phase = self._BEAT.unpack(raw)
            self._last = Beat(at, soft, hard, step, phase.rstrip(b"\0").decode(errors="replace"))
        return self._last

    def _put(self, at: int, raw: bytes) -> None:
        """As it is: pack_into would write zeros first, for others to see."""
        self._map[at : at + len(raw)] = raw

    def set_reported(self, at: float, thread: int) -> None:
        self._put(128, self._REPORTED.pack(at, thread))

    def reported(self) -> tuple[float, int]:
        at, thread = self._REPORTED.unpack_from(self._map, 128)
        return at, thread

    @property
    def monitor(self) -> int:
        return int(self._READY.unpack_from(self._map, 256)[0])

    @monitor.setter
    def monitor(self, process: int) -> None:
        self._put(256, self._READY.pack(process))

    def close(self) -> None:
        self._map.close()


class HangDetector:
    """When silence has lasted too long. Time in which the watcher itself stood still (Ctrl-Z, a suspended job or
    virtual machine) is not silence: the watched process stood still as well."""

    def __init__(self, beats: SharedHeartbeat, every: float, late_soft: float = 0.0, late_hard: float = 0.0) -> None:
        self.beats, self.every, self._late_soft, self._late_hard = (
            beats,
            every,
            late_soft,
            late_hard,
        )
        self._looked, self._at, self._excused, self._reported = time.monotonic(), 0.0, 0.0, False

    def check(self) -> tuple[str, Beat, float]:
        """("soft" once a silence | "hard" | "back" after a soft one | "", the beat, seconds of silence)."""
        now, beat, back = time.monotonic(), self.beats.read(), False
        stood_still, self._looked = now - self._looked - self.every, now
        if beat.at != self._at:
            back, self._reported, self._excused, self._at = self._reported, False, 0.0, beat.at
        if stood_still > 1.0:
            self._excused += min(stood_still, now - beat.at)
        silence = now - beat.at - self._excused
        if silence > beat.hard + self._late_hard:
            return "hard", beat, silence
        if silence > beat.soft + self._late_soft and not self._reported:
            self._reported = True
            return "soft", beat, silence
        return "back" if back else "", beat, silence


def report_name(rank: int, step: int) -> str:
    return f"rank-{rank}-step-{step}.txt"


def headline(rank: int, beat: Beat, silence: float) -> str:
    return f"rank {rank} made no progress for {silence:.1f} s at step {beat.step}, phase {beat.phase}"


def write_report(path: str, head: str, process: int, body: bytes) -> None:
    """Appends: a step may hang twice."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    with open(path, "ab") as file:
        file.write(f"{head} ({when}, {os.uname().nodename}, process {process})\n\n".encode() + body + b"\n")


def emit(text: str) -> None:
    """Straight to the descriptor: Python's own stderr may be locked by the thread that hangs."""
    try:
        os.write(2, f"hang: {text}\n".encode())
    except OSError:
        pass


def _apart(work: Callable[[], None]) -> None:
    """Runs `work` in a process of its own, which is not waited for."""
    if os.fork() == 0:
        signal.alarm(WRITER_S)
        try:
            work()
        finally:
            os._exit(0)


def _stacks(process: int, thread: int, number: int, fd: int) -> bytes:
    """What faulthandler writes on a signal. It runs in C, so it needs no lock; it is sent to the watchdog's own thread,
    so it interrupts no system call of the others."""
    start = size = os.fstat(fd).st_size
    import ctypes

    try:
        ctypes.CDLL(None).tgkill(process, thread, number)
    except AttributeError:  # no tgkill in this C library
        os.kill(process, number)
    for _ in range(40):  # two seconds at most; done when it has grown and stopped growing
        time.sleep(0.05)
        before, size = size, os.fstat(fd).st_size
        if size > start and size == before:
            break
    return os.pread(fd, size - start, start)


def _watch(
    process: int, rank: int, folder: str, every: float, number: int, beats: SharedHeartbeat, stacks_fd: int
) -> None:
    wait = _until_ended(process)
    detector = HangDetector(beats, every, LATE_SOFT_S, LATE_HARD_S)
    beats.monitor = os.getpid()
    killed = False
    while not wait(every):
        state, beat, silence = detector.check()
        reported_at, thread = beats.reported()
        head = f"{headline(rank, beat, silence)}; its threads do not answer"
        if state == "soft" and reported_at != beat.at:
            path = os.path.join(folder, report_name(rank, beat.step))
            _apart(partial(_report, path, head, process, _stacks(process, thread, number, stacks_fd)))
        elif state == "hard" and not killed:
            killed = True
            _apart(partial(emit, f"{head}: killed from outside, for a restart"))
            if os.getppid() == process:
                os.kill(process, signal.SIGKILL)


def _report(path: str, head: str, process: int, stacks: bytes) -> None:
    emit(f"{head}; stacks in {path}")
    os.close(2)  # its reader need not wait for a dead file system
    write_report(path, head, process, stacks)


def _until_ended(process: int) -> Callable[[float], bool]:
    """wait(seconds) -> True as soon as the watched process, our parent, has ended."""
    poll = select.poll()
    try:
        poll.register(os.pidfd_open(process), select.POLLIN)
    except (AttributeError, OSError):
        pass  # not Linux, or not allowed: then only our parent's number shows it, at the next poll
    return lambda seconds: bool(poll.poll(seconds * 1000)) or os.getppid() != process


def main(args: list[str]) -> None:
    process, rank, folder, every, number, heart_fd, stacks_fd = args
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)  # meant for the training process; it is watched while it saves
    if os.getppid() == int(process):
        _watch(
            int(process), int(rank), folder, float(every), int(number), SharedHeartbeat(int(heart_fd)), int(stacks_fd)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
