"""A worker process that can be killed while it works. Base of prompt_work.py's and schema_probe.py's processes."""

from __future__ import annotations

import atexit
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from erniekit.serve.work_queue import Killable, QueuedTask


class WorkerProcess:
    """Started when first needed. One thread gives it work; `kill` may come from any."""

    def __init__(self, start: Callable[[], subprocess.Popen[Any]]) -> None:
        self._start = start
        self._child: subprocess.Popen[Any] | None = None
        self._task: QueuedTask | None = None
        self._lock = threading.Lock()
        registered(self)

    @contextmanager
    def at_work(self, task: QueuedTask) -> Iterator[tuple[Any, Any]]:
        """Its two pipes, in and out, while it works on the task."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            self._task, child = task, self._child
        try:
            yield child.stdin, child.stdout
        finally:
            with self._lock:
                self._task = None

    def kill(self, task: QueuedTask | None = None) -> None:
        """The process; with a task, only if that is what it works on."""
        with self._lock:
            if self._child is not None and (task is None or task is self._task):
                self._child.kill()

    def reap(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            for pipe in (child.stdin, child.stdout):
                try:
                    pipe.close()  # type: ignore[union-attr]
                except OSError:  # what was still to be written cannot be
                    pass
            child.wait()


_PROCESSES: weakref.WeakSet[Killable] = weakref.WeakSet()


def registered(process: Killable) -> None:
    """It is killed when this process ends."""
    _PROCESSES.add(process)


@atexit.register
def kill_processes() -> None:
    for process in list(_PROCESSES):
        process.kill()
