"""Reads that fail for a moment (a network disk, no file handles, no memory) condemn no checkpoint: the command stops,
says which file, changes nothing, and the next try goes on."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from erniekit.checkpoint import manifest, model_folder
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.manifest import MANIFEST, Damaged, Unreadable
from erniekit.checkpoint.nodes import agree_on_checkpoint
from erniekit.checkpoint.safe import check_safetensors, read_json
from erniekit.checkpoint.state import load as load_state
from erniekit.errors import CheckpointError
from erniekit.export.source import find_source
from faults.results import fault

PASSING = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT", "EAGAIN", "ENODEV", "EACCES")


class FailsToRead(io.FileIO):
    code = errno.EIO

    def readinto(self, *_: Any) -> int:
        raise OSError(self.code, os.strerror(self.code))

    read = readall = readinto  # type: ignore[assignment]


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, victim: Path, code: int, call: str) -> Iterator[list[str]]:
    """Calls of one kind on one path fail; yields the list of those that did."""
    hits: list[str] = []
    plain_open, plain_stat, plain_list = io.open, os.stat, os.listdir

    def error() -> OSError:
        hits.append(call)
        return OSError(code, os.strerror(code))

    def opened(file: Any, *args: Any, **how: Any) -> Any:
        if os.fspath(file) != str(victim) or call == "stat":
            return plain_open(file, *args, **how)
        if call == "open":
            raise error()
        hits.append(call)
        broken = FailsToRead(os.fspath(file), "rb")
        broken.code = code
        return broken

    def statted(path: Any, *args: Any, **how: Any) -> Any:
        if call == "stat" and not isinstance(path, int) and os.fspath(path) == str(victim):
            raise error()
        return plain_stat(path, *args, **how)

    def listed(path: Any = ".") -> Any:
        if call == "list" and os.fspath(path) == str(victim):
            raise error()
        return plain_list(path)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(os, "stat", statted)
        patch.setattr(os, "listdir", listed)
        yield hits


def weights(step: int):
    def write(folder: Path) -> None:
        save_file({"w": np.full((64, 64), step, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        (folder / "state.json").write_text(f'{{"step": {step}}}')

    return write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run", keep_last=None) as manager:
        for step in (2, 4, 6):
            manager.save(step, weights(step))
    return tmp_path / "run"


def snapshot(folder: Path) -> dict[str, bytes]:
    """What was saved; not the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("checkpoint-*/*"))}


def test_no_error_of_the_system_condemns_a_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    before = snapshot(run)
    newest = run / "checkpoint-6"
    victims = [(path, call) for path in sorted(newest.iterdir()) for call in ("open", "read", "stat")]
    victims += [(newest, "stat"), (run, "list")]
    with fault("C2", "a read of any file of the newest checkpoint fails with any passing error") as row:
        row.lost, row.torn = 0, 0
        for name in PASSING:
            for victim, call in victims:
                row.count += 1
                with CheckpointManager(run) as manager:
                    with (
                        failing(monkeypatch, victim, getattr(errno, name), call) as hits,
                        pytest.raises(CheckpointError) as caught,
                    ):
                        manager.latest_good()
                    story = f"{name} at {call} of {victim.name}: {caught.value}"
                    assert hits, f"{story}: the fault did not happen"
                    row.hits += 1
                    assert isinstance(caught.value, Unreadable), story
                    assert victim.name in caught.value.what, story
                    assert "nothing was changed" in caught.value.what, story
                    assert "delete" not in caught.value.fix, story
                    assert snapshot(run) == before, story
                    assert manager.latest_good() == newest, "the next try goes on from the newest"
        row.note = "the command stops and names the file; nothing renamed, the next try goes on"
    assert "damaged" not in capsys.readouterr().err


def test_one_read_error_in_each_checkpoint_condemns_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(run)
    with CheckpointManager(run) as manager:
        for path in reversed(manager.list()):
            with failing(monkeypatch, path / "model.safetensors", errno.ESTALE, "read") as hits:
                for _ in range(3):
                    try:
                        manager.latest_good()
                    except Unreadable:
                        assert path.name == "checkpoint-6"
            assert bool(hits) == (path.name == "checkpoint-6"), "older ones are not needed"
    assert snapshot(run) == before


def test_a_process_out_of_file_handles_stops_and_renames_nothing(run: Path) -> None:
    before = snapshot(run)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with CheckpointManager(run) as manager:
        held = [os.open(os.devnull, os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limits[1]))
            with pytest.raises(Unreadable, match="Too many open files"):
                manager.latest_good()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            os.close(held[0])
        assert manager.latest_good() == run / "checkpoint-6"
    assert snapshot(run) == before


def test_a_missing_file_is_damage_and_so_is_a_folder_in_its_place(run: Path) -> None:
    (run / "checkpoint-6" / "config.json").unlink()
    with pytest.raises(Damaged, match=r"config\.json is missing"):
        manifest.check(run / "checkpoint-6")
    (run / "checkpoint-4" / MANIFEST).unlink()
    (run / "checkpoint-4" / MANIFEST).mkdir()
    with pytest.raises(Damaged, match="not a plain file"):
        manifest.check(run / "checkpoint-4")


def test_export_and_nodes_take_no_older_checkpoint_for_one_that_cannot_be_read_now(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = run / "checkpoint-6" / "model.safetensors"
    with failing(monkeypatch, victim, errno.EIO, "read") as hits:
        with pytest.raises(Unreadable, match="Input/output error"):
            find_source(run)
        with pytest.raises(Unreadable, match="Input/output error"):
            agree_on_checkpoint(CheckpointManager(run).latest_good, run, [0], 0, None)
    assert len(hits) == 2
    source = find_source(run)
    assert source is not None
    assert source.path == run / "checkpoint-6"


def test_readers_of_single_files_tell_a_passing_error_from_a_missing_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run / "checkpoint-6"
    for name, read in (
        ("config.json", lambda: read_json(folder / "config.json")),
        ("state.json", lambda: load_state(folder)),
        ("model.safetensors", lambda: check_safetensors(folder / "model.safetensors")),
    ):
        words = f"{name} cannot be read: Input/output error; nothing was changed"
        with failing(monkeypatch, folder / name, errno.EIO, "open") as hits, pytest.raises(Unreadable, match=words):
            read()
        assert hits
        read()
        (folder / name).unlink()
        with pytest.raises(Damaged, match=f"{name} is missing"):
            read()


def test_weights_that_cannot_be_opened_now_are_not_called_damaged(run: Path) -> None:
    """The safetensors library would say that there is no such file."""
    file = run / "checkpoint-6" / "model.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with pytest.raises(Unreadable, match="Too many open files"):
            model_folder._open_file(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(highest)
    model_folder._open_file(file)
