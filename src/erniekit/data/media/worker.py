"""Processes that read media and can be killed: a decoder that hangs or crashes costs one row, not the run.

The token cache gets headers from them, the loader's threads patches (`MediaPool.run`).
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from erniekit.data.media.limits import MediaError, MediaLimits, because
from erniekit.data.processes import Idle
from erniekit.errors import ErnieKitError

_SIZE = struct.Struct("<Q")
_BEAT = 0  # a message of no bytes: still at work
_BEAT_EVERY = 0.5  # seconds
_LOOK_EVERY = 0.5  # seconds without a message, then what the process did in them is checked
_PATIENCE = 10  # times its own time may pass on the clock: a busy machine must not decide which rows are bad
_MEMORY = 8 << 30  # bytes of address space that one may take
_READ = 1 << 20
_NAMELESS = ("bad_media", "too_much_memory")  # kinds of errors that a worker reports without the name of the medium
_START = MediaLimits(timeout=120, total=120)  # of a process, on a busy machine or a slow disk


class MediaWork(Protocol):
    def work(self, beat: Callable[[], None]) -> Any: ...


class MediaWorker:
    """One process, started on first use and again after it was killed."""

    BOOT = (
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
        "from erniekit.data.media.worker import serve; serve()"
    )

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def run(self, work: MediaWork, limits: MediaLimits, name: str) -> Any:
        """MediaError, also after `limits.timeout` seconds of its own without a sign of life, or `limits.total`."""
        try:
            process = self._started()
            assert process.stdin is not None
            pickle.dump(work, process.stdin, protocol=5)
            process.stdin.flush()
            answer = pickle.loads(self._answer(process, limits, name))
        except (BrokenPipeError, EOFError):
            self.stop()
            raise MediaError("decoder_died", f"{name}: the process that read it ended") from None
        except MediaError:
            self.stop()
            raise
        if isinstance(answer, MediaError) and answer.kind in _NAMELESS:
            raise MediaError(answer.kind, f"{name}: {answer.reason}")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        """From any thread: a caller that waits in `run` gets an error."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                pass

    def __del__(self) -> None:
        self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", self.BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            assert process.stdin is not None
            pickle.dump(sys.path, process.stdin)
            process.stdin.flush()
            self._take(process, _SIZE.size, _START, time.monotonic() + _START.total, "a process that reads media")
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], limits: MediaLimits, name: str) -> bytes:
        end = time.monotonic() + limits.total
        while True:
            (size,) = _SIZE.unpack(self._take(process, _SIZE.size, limits, end, name))
            if size != _BEAT:
                return self._take(process, size, limits, end, name)

    def _take(self, process: subprocess.Popen[bytes], size: int, limits: MediaLimits, end: float, name: str) -> bytes:
        assert process.stdout is not None
        pipe, out, idle = process.stdout.fileno(), bytearray(), Idle(process.pid)
        while len(out) < size:
            left = end - time.monotonic()
            if left <= 0:
                raise MediaError("timeout", f"{name}: not read within {limits.total:g} s")
            ready, _, _ = select.select([pipe], [], [], min(_LOOK_EVERY, limits.timeout, left))
            if not ready:
                idle.look()
                if idle.seconds >= limits.timeout or idle.passed >= _PATIENCE * limits.timeout:
                    raise MediaError("timeout", f"{name}: nothing was read for {limits.timeout:g} s (media_timeout)")
                continue
            part = os.read(pipe, min(_READ, size - len(out)))
            if not part:
                raise EOFError
            out += part
            idle.again()
        return bytes(out)


class MediaPool:
    """Up to `count` workers for any number of threads."""

    def __init__(self, count: int, limits: MediaLimits) -> None:
        self.limits = limits
        self.workers = [MediaWorker() for _ in range(count)]
        self._free: queue.SimpleQueue[MediaWorker] = queue.SimpleQueue()
        for worker in reversed(self.workers):
            self._free.put(worker)

    def run(self, work: MediaWork, name: str, limits: MediaLimits | None = None) -> Any:
        """limits: other ones of time than the pool's."""
        worker = self._free.get()
        try:
            return worker.run(work, limits or self.limits, name)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> MediaPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """The worker's loop: work in, its result or error out, until the parent closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _bound_memory()
    requests, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    lock = threading.Lock()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _preload()

    def send(message: bytes) -> None:
        with lock:
            left = memoryview(_SIZE.pack(len(message)) + message)
            while left:
                left = left[os.write(answers, left) :]

    send(b"")  # ready: from here on the time of a medium counts
    while True:
        try:
            work = pickle.load(requests)
        except EOFError:
            return
        last = time.monotonic()

        def beat() -> None:
            nonlocal last
            if time.monotonic() - last > _BEAT_EVERY:
                last = time.monotonic()
                send(b"")

        try:
            answer = work.work(beat)
        except (MediaError, ErnieKitError) as error:
            answer = error
        except MemoryError:
            answer = MediaError("too_much_memory", "reading it takes more memory than a decoder may have")
        except Exception as error:  # a decoder's own fault, met in a row
            answer = MediaError("bad_media", because("it cannot be read", error))
        send(pickle.dumps(answer, protocol=5))


def _end_with(parent: int) -> None:
    """A parent that was killed closes the pipe, which a decoder that hangs does not read."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os._exit(1)


def _preload() -> None:
    for name in ("erniekit.data.media.decode", "PIL.Image", "av"):
        try:
            importlib.import_module(name)
        except ImportError:  # reported by name when it is needed
            pass


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
