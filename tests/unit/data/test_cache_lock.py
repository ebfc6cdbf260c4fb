"""Waiting for a cache that another process makes: it is said for whom, its progress counts, a standstill ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from erniekit import heartbeat
from erniekit.data import cache_lock
from erniekit.data.cache_lock import only_one
from erniekit.errors import DataError
from support.clock import Clock, until

HOLDER = """
import sys, time
from pathlib import Path
from erniekit import heartbeat
from erniekit.data import cache_lock
cache_lock.TOUCH_S = 0.05
with cache_lock.only_one(Path(sys.argv[1])) as alone:
    print(alone, flush=True)
    while sys.argv[2] == "works":
        time.sleep(0.05)
        heartbeat.beat()
    time.sleep(60)
"""


class Waiting(Clock):
    """Of the one who waits: it looks often, and how long that was is for the test to say."""

    def sleep(self, seconds: float) -> None:
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.fixture(params=["works", "stands still"])
def holder(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, int]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder, request.param], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    yield request.param, process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_holder_that_works_is_waited_for_and_one_that_stands_still_is_not(
    holder: tuple[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    word, pid = holder
    clock = Waiting()
    monkeypatch.setattr(cache_lock, "time", clock)
    monkeypatch.setattr(cache_lock, "STALLED_S", 1.5)
    monkeypatch.setattr(cache_lock, "FIRST_NOTE_S", 0.3)
    beats: list[int] = []
    outcome: list[object] = []
    said: list[str] = []

    def wait() -> None:
        try:
            with heartbeat.listening(lambda: beats.append(1)), only_one(folder) as alone:
                outcome.append(alone)
        except DataError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()

    def is_said() -> bool:
        clock.now += 0.01  # the thread may begin to wait only now
        said.append(capsys.readouterr().err)
        return f"{folder}.lock is held by pid {pid} on " in "".join(said)

    until(is_said)
    if word == "works":
        for _ in range(10):
            beats.clear()
            until(lambda: outcome or len(beats) > 1)  # its progress is that of the one who waits
            clock.now += 1
        assert not outcome, "and is seen: ten seconds are not too long"
        subprocess.run(["kill", str(pid)], check=True)
        thread.join(60)
        assert outcome == [True], "the next in turn"
    else:
        assert not outcome
        clock.now += 1.5
        thread.join(60)
        (error,) = outcome
        assert isinstance(error, DataError)
        assert f"pid {pid}" in error.what
        assert "no progress" in error.what
        assert error.where == f"{folder}.lock"
        assert not beats


def test_the_lock_tells_its_holder_and_is_empty_again_behind_it(folder: Path) -> None:
    lock = folder.with_name("tokens.lock")
    lock.write_text("pid 1 on a machine that lost its power")
    for _ in range(2):
        with only_one(folder) as alone:
            assert alone
            assert lock.read_text() == f"pid {os.getpid()} on {socket.gethostname()}"
        assert lock.read_text() == ""


def test_a_file_that_is_not_ours_stays_as_it_is_though_it_is_locked(folder: Path) -> None:
    lock = folder.with_name("tokens.lock")
    lock.write_text("my notes")
    with only_one(folder) as alone:
        assert alone
        heartbeat.beat()
        assert lock.read_text() == "my notes"
    assert lock.read_text() == "my notes"
