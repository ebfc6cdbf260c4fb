"""Signals of a run, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

RUN = """
import os, signal, sys, time
from erniekit.train import guard
guard.TELLS_AFTER_S = 0.2
with guard.Signals() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(float(sys.argv[1]))
    if len(sys.argv) > 2:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
print("left", signals.requested)
"""


def ran(*words: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.splitlines()


def test_a_step_that_goes_on_after_a_signal_says_what_a_second_one_does() -> None:
    code, lines = ran("1.5")
    assert code == 0
    assert "a second signal (Ctrl-C) ends the run now" in lines[0]
    assert lines[1:] == ["left SIGINT"]


def test_a_step_that_ends_soon_says_nothing() -> None:
    assert ran("0") == (0, ["left SIGINT"])


def test_a_second_signal_ends_the_run_at_once() -> None:
    code, lines = ran("1.5", "again")
    assert code == 130
    assert len(lines) == 1
