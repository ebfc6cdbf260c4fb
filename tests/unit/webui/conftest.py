"""Jobs in a folder of their own; their processes are real, and small enough to start in a blink."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from erniekit.webui import process
from erniekit.webui.jobs import Jobs, WebJob
from erniekit.webui.paths import Roots

RECIPE = "model_name_or_path: model\ntrain_dataset_path: [data.jsonl]\n"


class Stand:
    """Starts, in place of the CLI, a Python that runs `program`; remembers what the CLI would have been given."""

    def __init__(self) -> None:
        self.program = "import time; time.sleep(60)"
        self.asked: list[list[str]] = []
        self.pids: list[int] = []

    def __call__(self, argv: list[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
        self.asked.append(argv)
        with log.open("ab") as out:
            words = [sys.executable, "-u", "-S", "-c", self.program]
            child = subprocess.Popen(words, stdout=out, stderr=out, cwd=folder, start_new_session=True)
        self.pids.append(child.pid)
        return child


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    yield stand
    for pid in stand.pids:
        if process.identity(pid):
            os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A root with a model and a data file in it."""
    (tmp_path / "work" / "model").mkdir(parents=True)
    (tmp_path / "work" / "data.jsonl").write_text('{"src": ["a"], "tgt": ["b"]}\n')
    return tmp_path / "work"


@pytest.fixture
def jobs(room: Path, stand: Stand) -> Jobs:
    return Jobs(room / "webui", Roots([room]), stand)


def until(jobs: Jobs, id: str, holds: Callable[[WebJob], bool], seconds: float = 60) -> WebJob:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        job = jobs.get(id)
        if holds(job):
            return job
        time.sleep(0.02)
    raise AssertionError(f"still {jobs.get(id)}")
