"""Signals of a run, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import os, signal, sys, time
from erniekit.train import guard
guard.TELLS_AFTER_S = 0.2 if sys.argv[1] == "long" else 60
newest = {"none": lambda: "", "16": lambda: "checkpoint-16"}
with guard.Signals(newest.get(sys.argv[-1])) as signals:
    os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == "long":  # until the first signal was answered
        sys.stdin.readline()
    if len(sys.argv) > 2:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
print("left", signals.requested)
"""


def ran(*words: str) -> tuple[int, list[str]]:
    done = process(*words)
    return done.returncode, done.stdout.splitlines()


def process(*words: str) -> subprocess.CompletedProcess[str]:
    """Of a step that is short, or long: it goes on until the line about the signal stands on the screen."""
    command, pipe = [sys.executable, "-c", RUN, *words], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None
        line = run.stdout.readline() if words[0] == "long" else ""
        out, err = run.communicate("\n", timeout=120)
    return subprocess.CompletedProcess(command, run.returncode, line + out, err)


def test_a_step_that_goes_on_after_a_signal_says_what_a_second_one_does() -> None:
    code, lines = ran("long")
    assert code == 0
    assert "a second signal (Ctrl-C) ends the run now" in lines[0]
    assert lines[1:] == ["left SIGINT"]


def test_a_step_that_ends_soon_says_nothing() -> None:
    assert ran("short") == (0, ["left SIGINT"])


def test_a_second_signal_ends_the_run_at_once() -> None:
    code, lines = ran("long", "again")
    assert code == 130
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("point", "next_step"),
    [("16", "it resumes from checkpoint-16"), ("none", "it starts again, as there is no checkpoint yet")],
)
def test_a_second_signal_says_that_nothing_was_saved_and_what_the_same_command_does(point: str, next_step: str) -> None:
    done = process("long", "again", point)
    assert done.returncode == 130
    assert done.stderr.splitlines() == [
        "stopped by SIGINT without a save",
        f"next: run the same command; {next_step}",
    ]


def test_where_a_launcher_says_how_a_run_ended_the_rank_says_nothing() -> None:
    assert process("long", "again").stderr == ""
