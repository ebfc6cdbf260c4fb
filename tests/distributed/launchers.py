"""Launchers in processes of their own, forked: the two seconds of `import torch` are paid once a session."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from erniekit.cli import main as cli
from erniekit.cli.commands import COMMANDS, Command
from erniekit.launch import (
    agent,  # noqa: F401 - imported here, so that no forked launcher has to
)
from erniekit.launch.plan import LaunchPlan
from erniekit.launch.start import start
from support.clock import until

WORKER = str(Path(__file__).with_name("launch_worker.py"))
CPP = re.compile(r"^\[W\d{4} .*\n(Exception raised from .*\n((frame #|<omitting).*\n)*\n?)?", re.MULTILINE)
LEFT_S = 15.0  # the promise: how long the others may take to leave
LATE_S = 25.0  # the same on a machine that stands still now and then; who is not told leaves after 30 s and more


@dataclass
class Launcher:
    pid: int
    out: Path
    err: Path

    def wait(self, seconds: float = 180) -> int:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"the launcher did not end; it said: {self.err.read_text()}")

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def said(self) -> list[str]:
        """On stderr, without torch's remarks from C++: a launcher silences them before it imports torch, we had it."""
        return CPP.sub("", self.err.read_text()).splitlines()


def forked(folder: Path, run: Callable[[], int], terminal: int | None = None) -> Launcher:
    """`run` in a child of this process, its errors handled as those of an `erniekit` command."""
    folder.mkdir(parents=True, exist_ok=True)
    child = Launcher(0, folder / "out", folder / "err")
    child.err.touch()
    child.pid = os.fork()
    if child.pid:
        return child
    code = 99
    try:
        for fd, path in ((1, child.out), (2, child.err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if terminal is None else terminal, fd)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        cli.run = lambda args: run()  # type: ignore[attr-defined]
        COMMANDS["run"] = Command("erniekit.cli.main:run", "x", "x", ("x",))
        code = cli.main(["run"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def launcher(folder: Path, launch: LaunchPlan, *words: object, terminal: int | None = None) -> Launcher:
    """`words` played by tests/distributed/launch_worker.py in every rank."""
    return forked(folder, lambda: start(launch, [sys.executable, WORKER, *map(str, words)]), terminal)


def wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() and path.stat().st_size for path in paths), f"{paths} are written")


def wait_for_words(launcher: Launcher, words: str) -> list[str]:
    """What it has said, once there is a line that begins so."""
    until(lambda: any(line.startswith(words) for line in launcher.said()), f"{launcher.err} says {words!r}")
    return launcher.said()


def wait_for_host(port: int) -> None:
    """Until a launcher holds the store that all meet at."""
    until(lambda: _answers(port), f"somebody listens at {port}")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
