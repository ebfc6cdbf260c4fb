"""Looks at schemas in a process that can be killed, before they are compiled in this one. Used by grammar_work.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from erniekit.serve import schema_check
from erniekit.serve.output_grammar import JsonPart
from erniekit.serve.work_queue import QueuedTask
from erniekit.serve.worker_process import WorkerProcess

PROBE_S = 3.0  # of processor time; compiling takes no longer than that again


class TooComplex(Exception):
    """The process was ended: by its limits of time and memory, or because the client has left."""


class SchemaProbe(WorkerProcess):
    def __init__(self, seconds: float = PROBE_S) -> None:
        super().__init__(_start)
        self.seconds = seconds

    def first_wrong(self, parts: Sequence[JsonPart], task: QueuedTask) -> tuple[str, str] | None:
        """(place, why) of the first schema that cannot be compiled. Raises TooComplex."""
        request = [self.seconds, [[json.loads(part.schema), part.place] for part in parts]]
        with self.at_work(task) as (requests, answers):
            try:
                requests.write(json.dumps(request) + "\n")
                requests.flush()
                answer = answers.readline()
            except OSError:
                answer = ""
        if not answer:
            self.reap()
            raise TooComplex
        found = json.loads(answer)
        return (found[0], found[1]) if found else None


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
