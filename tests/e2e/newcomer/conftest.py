"""One run of `erniekit demo` for every test in this folder: its folder is a trained world to try commands on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class DemoRun:
    cwd: Path
    folder: Path  # cwd / "erniekit-demo", the default
    output: str
    seconds: float  # on a machine that nothing else wants: waited for, or of its processor where that is less


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    cwd = tmp_path_factory.mktemp("newcomer")
    # A network would be a hidden help: point every client at a closed port.
    nowhere = "http://127.0.0.1:9"
    env = {**os.environ, "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "HF_ENDPOINT": nowhere, "NO_COLOR": "1"}
    began, before = time.monotonic(), _processor()
    done = subprocess.run([sys.executable, "-m", "erniekit", "demo"], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = min(time.monotonic() - began, _processor() - before)
    return DemoRun(cwd, cwd / "erniekit-demo", done.stdout, seconds)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
