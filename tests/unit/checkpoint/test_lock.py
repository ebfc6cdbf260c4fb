"""One trainer per folder; a lock whose holder is gone is taken over, any other is respected."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from erniekit.checkpoint import lock
from erniekit.checkpoint.lock import Holder, RunLock
from erniekit.errors import CheckpointError

HOLD = "import sys; from pathlib import Path; from erniekit.checkpoint.lock import RunLock\n"
HOLD += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"


def another_process(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def left_behind(folder: Path, **changes: object) -> None:
    (folder / lock.LOCK).write_text(json.dumps(asdict(replace(Holder.me(), **changes))))


def test_a_second_process_is_refused_with_the_name_of_the_first_until_it_is_killed(tmp_path, capsys):
    first = another_process(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=f"pid {first.pid} on ") as caught:
            RunLock(tmp_path).acquire()
        assert str(tmp_path / lock.LOCK) in caught.value.fix
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    with RunLock(tmp_path) as held:
        assert held.held
        assert json.loads((tmp_path / lock.LOCK).read_text())["pid"] == os.getpid()
    assert f"its holder (pid {first.pid}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_same_process_cannot_hold_a_folder_twice_but_can_take_it_again(tmp_path):
    first = RunLock(tmp_path / "new" / "folder")
    for _ in range(2):
        assert first.acquire().acquire().held
        with pytest.raises(CheckpointError, match=f"pid {os.getpid()}"):
            RunLock(tmp_path / "new" / "folder").acquire()
        first.release()
        first.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 2**22 + 1},  # above the largest pid there is
        {"boot": "another boot"},
        {"started": "12345"},  # the pid lives, but it is another process now
        {"host": "another-node"},  # the OS lock is free, so whoever wrote this is gone
        {"namespace": "pid:[1]"},
    ],
)
def test_a_lock_whose_holder_is_gone_is_taken_over(tmp_path, changes):
    left_behind(tmp_path, **changes)
    with RunLock(tmp_path) as held:
        assert held.held


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1', '{"pid": 1, "colour": "red"}'])
def test_half_a_record_is_no_holder(tmp_path, text):
    (tmp_path / lock.LOCK).write_text(text)
    with RunLock(tmp_path) as held:
        assert held.held


def test_a_live_record_counts_even_where_the_os_lock_does_nothing(tmp_path):
    left_behind(tmp_path)  # this very process, no flock held
    with pytest.raises(CheckpointError, match=f"pid {os.getpid()}"):
        RunLock(tmp_path).acquire()


def test_on_a_disk_without_os_locks_the_record_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_flock", lambda fd: None)
    with RunLock(tmp_path), pytest.raises(CheckpointError, match=f"pid {os.getpid()}"):
        RunLock(tmp_path).acquire()
    for changes in ({"pid": 2**22 + 1}, {"boot": "another boot"}):
        left_behind(tmp_path, **changes)
        with RunLock(tmp_path) as held:
            assert held.held
    left_behind(tmp_path, host="another-node")  # nobody can tell: a person has to
    with pytest.raises(CheckpointError, match="another-node"):
        RunLock(tmp_path).acquire()


def test_a_forked_worker_neither_holds_nor_releases_its_parents_lock(tmp_path):
    """The worker outlives a killed trainer: the folder must be free at once."""
    read, write = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        held = RunLock(tmp_path).acquire()
        worker = os.fork()
        if worker == 0:
            held.release()
            os.write(write, f"{os.getpid()} {held.held}\n".encode())
            signal.pause()
        signal.pause()
    worker_pid, worker_held = os.read(read, 100).decode().split()
    try:
        assert worker_held == "False"
        with pytest.raises(CheckpointError, match=f"pid {trainer}"):
            RunLock(tmp_path).acquire()
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        with (tmp_path / lock.LOCK).open() as left:  # free for other hosts, too, which cannot see who is dead
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with RunLock(tmp_path) as again:
            assert again.held
    finally:
        os.kill(int(worker_pid), signal.SIGKILL)


def test_an_os_lock_kept_by_a_child_of_a_dead_trainer_is_taken_over(tmp_path):
    """A child that was not forked by Python keeps the descriptor: the record tells that its owner is gone."""
    keeper = another_process(tmp_path)
    try:
        left_behind(tmp_path, pid=2**22 + 1)
        with RunLock(tmp_path) as held:
            assert held.held
    finally:
        keeper.kill()
        keeper.communicate()


@pytest.mark.parametrize("changes", [{"host": "another-node"}, {"namespace": "pid:[1]"}, {"boot": "another boot"}])
def test_an_os_lock_held_by_a_process_we_cannot_see_is_respected(tmp_path, changes):
    """On a shared disk, or from another container, the pid in the record means nothing to us."""
    keeper = another_process(tmp_path)
    try:
        left_behind(tmp_path, pid=2**22 + 1, **changes)
        with pytest.raises(CheckpointError, match="another run is training"):
            RunLock(tmp_path).acquire()
    finally:
        keeper.kill()
        keeper.communicate()


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="nothing can be written into the folder"):
        RunLock(tmp_path / "file" / "out").acquire()


@pytest.mark.parametrize("content", ["a thesis", '{"pid": 1}'])
def test_a_file_that_is_no_lock_of_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text(content)
    folder = tmp_path / "run"
    folder.mkdir()
    os.link(thesis, folder / ".erniekit.lock")
    with pytest.raises(CheckpointError, match="not a lock that erniekit wrote"):
        RunLock(folder).acquire()
    assert thesis.read_text() == content


def test_a_user_s_file_under_the_lock_s_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / lock.LOCK).write_text("[]")
    with pytest.raises(CheckpointError, match="not a lock that erniekit wrote"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / lock.LOCK).read_text() == "[]"
