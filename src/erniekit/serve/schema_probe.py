"""Looks at schemas in a process that can be killed, before they are compiled in this one. Used by grammar_work.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

from erniekit.serve import schema_check
from erniekit.serve.output_grammar import JsonPart
from erniekit.serve.prompt_work import registered
from erniekit.serve.work_queue import QueuedTask

PROBE_S = 3.0  # of processor time; compiling takes no longer than that again


class TooComplex(Exception):
    """The process was ended: by its limits of time and memory, or because the client has left."""


class SchemaProbe:
    """One process, started when first needed. One thread gives it work; `kill` may come from any."""

    def __init__(self, seconds: float = PROBE_S) -> None:
        self.seconds = seconds
        self._child: subprocess.Popen[str] | None = None
        self._task: QueuedTask | None = None
        self._lock = threading.Lock()
        registered(self)

    def first_wrong(self, parts: Sequence[JsonPart], task: QueuedTask) -> tuple[str, str] | None:
        """(place, why) of the first schema that cannot be compiled. Raises TooComplex."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = _start()
            self._task, child = task, self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            asked = [self.seconds, [[json.loads(part.schema), part.place] for part in parts]]
            child.stdin.write(json.dumps(asked) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = ""
        finally:
            with self._lock:
                self._task = None
        if not answer:
            self.reap()
            raise TooComplex
        found = json.loads(answer)
        return (found[0], found[1]) if found else None

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
            child.communicate()


def _start() -> subprocess.Popen[str]:
    # Its own session: a Ctrl-C in the terminal is for the server to handle. Packages are found as here.
    return subprocess.Popen(
        [sys.executable, schema_check.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
