"""Disk full, failing, gone or slow: what was saved stays whole, training goes on and says so."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.errors import CheckpointError
from faults.results import fault

CHANGES = ("mkdir", "create", "write", "sync", "rename", "unlink", "rmdir")


def tensors(step: int) -> dict[str, np.ndarray]:
    return {f"layer.{i}": np.full((100, 10), step + i, np.float32) for i in range(4)}


def weights(step: int) -> writer.Write:
    def write(folder: Path) -> None:
        data = save(tensors(step))
        writer.write_file(folder / "model.safetensors", [data[i : i + 1000] for i in range(0, len(data), 1000)])
        writer.write_file(folder / "state.json", [b'{"step": %d}' % step])

    return write


def library_weights(step: int) -> writer.Write:
    return lambda folder: save_file(tensors(step), folder / "model.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with CheckpointManager(folder) as manager:
        manager.save(1, weights(1))
        manager.save(2, weights(2))
    return folder


def expect_untouched(manager: CheckpointManager, capsys, reason: str) -> None:
    """The failed save was counted and said; the two before it are whole, nothing else is left."""
    assert manager.misses == 1
    said = capsys.readouterr().err
    assert "CHECKPOINT NOT SAVED: checkpoint-3 was not written" in said
    assert reason in said
    assert sorted(p.name for p in manager.output_dir.iterdir() if p.is_dir()) == ["checkpoint-1", "checkpoint-2"]
    for path in manager.list():
        manifest.check(path)


def expect_next_save_works(manager: CheckpointManager) -> None:
    assert manager.save(4, weights(4)) is not None
    assert manager.misses == 0
    assert [p.name for p in manager.list()] == ["checkpoint-2", "checkpoint-4"]
    manager.verify(manager.output_dir / "checkpoint-4", "full")


class FullDisk(writer.FileOps):
    """Takes `room` bytes: the write that crosses the line is cut short, the next one fails, as on a real disk."""

    def __init__(self, room: int) -> None:
        self.room, self.refused = room, 0

    def write(self, fd: int, data: memoryview) -> int:
        if self.room == 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(fd, data[: self.room])
        self.room -= count
        return count


def test_a_disk_that_fills_at_any_byte_costs_one_save_and_nothing_else(saved, tmp_path, monkeypatch, capsys):
    total = sum(path.stat().st_size for path in (saved / "checkpoint-2").iterdir())
    points = sorted({total * i // 30 for i in range(30)} | {1, total - 1})
    with fault("D1", "disk full after any number of bytes") as row:
        row.lost = row.torn = 0
        for room in points:
            folder = shutil.copytree(saved, tmp_path / "out")
            disk = FullDisk(room)
            with CheckpointManager(folder) as manager:
                monkeypatch.setattr(writer, "ops", disk)
                assert manager.save(3, weights(3)) is None
                row.hits += disk.refused
                monkeypatch.setattr(writer, "ops", writer.FileOps())
                expect_untouched(manager, capsys, "No space left on device")
                expect_next_save_works(manager)
            shutil.rmtree(folder)
            row.count += 1
        assert row.hits == len(points) >= 30


def test_a_file_size_limit_of_the_system_stops_the_library_in_the_middle(saved, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [0, 1, 100, 1000, 8000, 16_000]
    with fault("D1", "file size limit of the system") as row:
        row.lost = row.torn = 0
        for limit in limits:
            folder = shutil.copytree(saved, tmp_path / "out")
            with CheckpointManager(folder) as manager:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
                try:
                    assert manager.save(3, library_weights(3)) is None
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                expect_untouched(manager, capsys, "File too large")
                expect_next_save_works(manager)
            shutil.rmtree(folder)
            row.count, row.hits = row.count + 1, row.hits + 1


def test_too_little_space_is_found_before_writing_and_no_old_checkpoint_is_spent_on_room(saved, tmp_path, capsys):
    folder = shutil.copytree(saved, tmp_path / "out")
    with CheckpointManager(folder) as manager:
        free = shutil.disk_usage(folder).free
        assert manager.save(3, lambda folder: pytest.fail("wrote"), expected_bytes=free) is None
        said = capsys.readouterr().err
        assert "CHECKPOINT NOT SAVED: checkpoint-3 needs" in said
        assert [p.name for p in manager.list()] == ["checkpoint-1", "checkpoint-2"]


class FailAt(writer.FileOps):
    """The i-th change of the disk fails, the ones after it work again (or fail too, when it is `broken`)."""

    def __init__(self, at: int, code: int = errno.EIO, broken: bool = False) -> None:
        self.at, self.code, self.broken, self.count, self.failed = at, code, broken, 0, 0

    def __getattribute__(self, name: str):
        call = super().__getattribute__(name)
        if name not in CHANGES:
            return call

        def counted(*args):
            self.count += 1
            if self.count == self.at or (self.broken and self.count > self.at):
                self.failed += 1
                raise OSError(self.code, os.strerror(self.code))
            return call(*args)

        return counted


@pytest.mark.parametrize("broken", [False, True], ids=["one call fails", "every later call fails too"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS], ids=["EIO", "read-only"])
def test_a_failing_disk_at_any_call_leaves_whole_checkpoints(saved, tmp_path, monkeypatch, capsys, code, broken):
    with fault("D2", "I/O error or read-only disk at every call of a save, passing or lasting") as row:
        row.lost = row.torn = 0
        at, missed, failed = 0, 0, 0
        while True:
            at += 1
            folder = shutil.copytree(saved, tmp_path / "out")
            disk = FailAt(at, code, broken)
            manager = CheckpointManager(folder).start()
            monkeypatch.setattr(writer, "ops", disk)
            new = manager.save(3, weights(3))
            monkeypatch.setattr(writer, "ops", writer.FileOps())
            failed += disk.failed > 0
            missed += manager.misses
            for path in manager.list():
                manifest.check(path)
            newest = manager.latest_good()
            assert newest is not None
            assert newest.name in ({"checkpoint-3"} if new else {"checkpoint-2", "checkpoint-3"})
            if manager.misses:
                assert os.strerror(code) in capsys.readouterr().err
            manager.close()
            with CheckpointManager(folder) as again:  # a new start finds the folder in order
                assert again.latest_good() == newest
                assert not [p.name for p in folder.iterdir() if p.name.startswith((".tmp-", ".del-", ".old-"))]
                assert again.save(4, weights(4)) is not None
            shutil.rmtree(folder)
            if not disk.failed:
                break
        assert failed == at - 1 >= 25  # every call of the save failed once
        assert missed >= 20  # the rest belong to the deletion of an old one, which fails no save
        row.count, row.hits = at - 1, failed


def test_an_output_folder_that_vanishes_costs_saves_until_it_is_back(saved, tmp_path, capsys):
    folder = shutil.copytree(saved, tmp_path / "out")
    manager = CheckpointManager(folder).start()
    with fault("D2", "the output folder vanishes and comes back") as row:
        row.lost = row.torn = 0
        folder.rename(tmp_path / "elsewhere")
        assert manager.save(3, weights(3)) is None
        said = capsys.readouterr().err
        assert "No such file or directory" in said
        assert not folder.exists()  # an unmounted disk must not be replaced by a folder on another one
        row.count = row.hits = 1
        (tmp_path / "elsewhere").rename(folder)
        expect_next_save_works(manager)
        manager.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the read-only case above covers the code")
def test_a_folder_that_became_read_only_costs_saves_until_it_is_writable(saved, tmp_path, capsys):
    folder = shutil.copytree(saved, tmp_path / "out")
    with CheckpointManager(folder) as manager:
        folder.chmod(0o555)
        assert manager.save(3, weights(3)) is None
        folder.chmod(0o755)
        expect_untouched(manager, capsys, "Permission denied")
        expect_next_save_works(manager)


def test_a_slow_disk_does_not_hold_up_training_in_the_background(saved, tmp_path, monkeypatch):
    go_on = threading.Event()

    class Slow(writer.FileOps):
        def write(self, fd: int, data: memoryview) -> int:
            assert go_on.wait(60)
            time.sleep(0.05)
            return super().write(fd, data)

    folder = shutil.copytree(saved, tmp_path / "out")
    monkeypatch.setattr(writer, "ops", Slow())
    with fault("D2", "a slow disk, saves in the background") as row:
        row.count = row.hits = 1
        row.lost = row.torn = 0
        with CheckpointManager(folder, async_save=True) as manager:
            began = time.perf_counter()
            manager.save(3, weights(3))  # 19 writes: about 1 s
            manager.check()
            blocked = time.perf_counter() - began  # here nothing is written yet
            go_on.set()
            manager.wait()
            took = time.perf_counter() - began
            assert took > 0.9
            assert blocked < 30, "not the 60 s that the disk would have taken"
        assert manager.latest_good() == folder / "checkpoint-3"
        row.note = f"a save of {took:.1f} s held training up for {blocked * 1e3:.0f} ms"


def test_a_final_save_on_a_full_disk_ends_the_run_with_an_error(saved, tmp_path, monkeypatch):
    folder = shutil.copytree(saved, tmp_path / "out")
    with CheckpointManager(folder) as manager:
        monkeypatch.setattr(writer, "ops", FullDisk(500))
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            manager.save(3, weights(3), final=True)
        assert "checkpoint-2" in caught.value.what
        assert "free space" in caught.value.fix
