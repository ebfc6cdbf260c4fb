"""The folder of the ranks' errors is gone when its launcher is, however that ended."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from erniekit.launch.error_folder import LOCK, PREFIX, error_folder

HOLD = """
import sys, time
from erniekit.launch.error_folder import error_folder
with error_folder() as folder:
    (folder / "1.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_killed_launchers_folder_is_removed_by_the_next_and_a_living_ones_is_not(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with error_folder() as ours:
            assert {path.name for path in theirs.iterdir()} == {LOCK, "1.json"}
            assert ours != theirs
        assert not ours.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert theirs.is_dir()
        with error_folder():
            assert not theirs.exists()
    assert list(place.iterdir()) == []


def test_the_folder_of_another_machine_stays_though_its_lock_does_not_show_here(place: Path) -> None:
    """As on a shared TMPDIR that is mounted with local locks."""
    with error_folder() as ours:
        theirs = place / f"{PREFIX}other"
        shutil.copytree(ours, theirs)
        (theirs / LOCK).write_text("another-machine")
        with error_folder():
            assert theirs.is_dir()
        (theirs / LOCK).write_text((ours / LOCK).read_text())
        with error_folder():
            assert not theirs.exists()


@pytest.mark.parametrize("names", [(), (LOCK, "notes.txt"), ("1.json",)])
def test_what_no_launcher_left_stays(place: Path, names: tuple[str, ...]) -> None:
    folder = place / f"{PREFIX}mine"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(socket.gethostname())
    with error_folder():
        pass
    assert {path.name for path in folder.iterdir()} == set(names)
