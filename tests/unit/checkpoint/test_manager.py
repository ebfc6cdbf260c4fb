"""Which checkpoints stay, which one a run goes on from, and what a failed save does to training."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.manifest import MANIFEST
from erniekit.errors import CheckpointError
from support.clock import until


def weights(step: int):
    return lambda folder: (folder / "model.txt").write_text(f"weights of {step}") and None


def fails(folder: Path) -> None:
    (folder / "model.txt").write_text("half")
    raise OSError(28, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


def damage(path: Path) -> None:
    (path / "model.txt").write_text("WEIGHTS" + (path / "model.txt").read_text()[7:])


def test_rotation_keeps_the_newest_the_best_and_every_hundredth(tmp_path):
    with CheckpointManager(tmp_path, keep_last=2, keep_every=100) as manager:
        for step in range(20, 261, 20):
            manager.save(step, weights(step))
            if step == 60:
                manager.protect(60)
        assert [p.name for p in manager.list()] == [f"checkpoint-{s}" for s in (60, 100, 200, 240, 260)]
        manager.protect(240)
        manager.save(280, weights(280))
        manager.save(300, weights(300))
    assert [p.name for p in manager.list()] == [f"checkpoint-{s}" for s in (100, 200, 240, 280, 300)]
    assert manifest.load(tmp_path / "checkpoint-240").info == {"step": 240}
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_advice_names_the_newest_with_every_file_and_renames_nothing(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        assert manager.newest_whole() is None
        for step in (2, 4, 6):
            manager.save(step, weights(step))
        (tmp_path / "checkpoint-6" / "model.txt").unlink()
        assert manager.newest_whole() == tmp_path / "checkpoint-4"
        assert manager.newest_whole(before=4) == tmp_path / "checkpoint-2"
        assert manager.newest_whole(before=2) is None
        assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_no_limit_keeps_all_and_a_limit_of_one_keeps_two(tmp_path, capsys):
    with CheckpointManager(tmp_path / "a", keep_last=None) as manager:
        for step in range(1, 6):
            manager.save(step, weights(step))
        assert len(manager.list()) == 5
    with CheckpointManager(tmp_path / "b", keep_last=1) as manager:
        for step in range(1, 6):
            manager.save(step, weights(step))
        assert len(manager.list()) == 2
    assert "keeping 2 checkpoints, not 1" in capsys.readouterr().err


def test_steps_are_ordered_as_numbers_and_other_folders_are_not_checkpoints(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-100", "checkpoint-x", "checkpoint-07", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    assert [p.name for p in CheckpointManager(tmp_path).list()] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert CheckpointManager(tmp_path / "nowhere").list() == []


def test_a_damaged_newest_one_is_set_aside_and_the_one_before_is_used(tmp_path, capsys):
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        for step in (1, 2, 3):
            manager.save(step, weights(step))
        damage(tmp_path / "checkpoint-3")
        assert manager.latest_good() == tmp_path / "checkpoint-2"
        assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3.corrupt-1"]
        manager.save(3, weights(3))
        damage(tmp_path / "checkpoint-3")
        assert manager.latest_good() == tmp_path / "checkpoint-2"
    assert "checkpoint-3.corrupt-2" in names(tmp_path)
    assert "model.txt does not match its sha256" in capsys.readouterr().err


def test_a_reader_without_the_lock_renames_nothing(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, weights(1))
        manager.save(2, weights(2))
    damage(tmp_path / "checkpoint-2")
    assert CheckpointManager(tmp_path).latest_good() == tmp_path / "checkpoint-1"
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_an_empty_folder_starts_afresh_but_one_with_only_damaged_checkpoints_stops(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_good() is None
        manager.save(1, weights(1))
        damage(tmp_path / "checkpoint-1")
        for _ in range(2):  # the second time it is already set aside
            with pytest.raises(CheckpointError, match="every checkpoint in this folder is damaged"):
                manager.latest_good()


def test_verify_names_the_file_and_reads_as_deep_as_asked(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(1, weights(1))
        manager.verify(path)
        damage(path)
        manager.verify(path, "size")
        with pytest.raises(CheckpointError, match=r"model\.txt"):
            manager.verify(path)
        depths = []
        monkeypatch.setattr(manifest, "check", lambda path, depth: depths.append(depth))
        monkeypatch.setattr(manifest, "_FULL_BELOW", 10)
        for mode in ("auto", "full", "size"):
            manager.verify(path, mode)
        assert depths == ["sample", "full", "size"]


def test_a_new_checkpoint_that_does_not_verify_deletes_no_old_one(tmp_path, monkeypatch, capsys):
    with CheckpointManager(tmp_path, keep_last=2, verify="full") as manager:
        manager.save(1, weights(1))
        manager.save(2, weights(2))
        publish = writer.publish

        def bad_disk(*args, **kwargs):
            path = publish(*args, **kwargs)
            damage(path)
            return path

        monkeypatch.setattr(writer, "publish", bad_disk)
        assert manager.save(3, weights(3)) is None
        assert manager.misses == 1
        assert "CHECKPOINT NOT SAVED" in capsys.readouterr().err
        assert manager.latest_good() == tmp_path / "checkpoint-2"
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3.corrupt-1"]


def test_training_goes_on_after_a_failed_save_and_stops_at_the_third_in_a_row(tmp_path, capsys):
    with CheckpointManager(tmp_path, max_misses=3) as manager:
        manager.save(1, weights(1))
        assert manager.save(2, fails) is None
        assert manager.save(3, fails) is None
        assert manager.misses == 2
        said = capsys.readouterr().err
        assert "CHECKPOINT NOT SAVED: checkpoint-3 was not written: No space left on device" in said
        assert "checkpoint-1" in said
        manager.save(4, weights(4))
        assert manager.misses == 0
        manager.save(5, fails)
        manager.save(6, fails)
        with pytest.raises(CheckpointError, match=r"3 saves failed in a row, the newest one on disk is checkpoint-4"):
            manager.save(7, fails)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]


def test_the_final_save_must_work(tmp_path):
    for async_save in (False, True):
        with (
            CheckpointManager(tmp_path, async_save=async_save) as manager,
            pytest.raises(CheckpointError, match="No space left"),
        ):
            manager.save(9, fails, final=True)


def test_a_background_save_does_not_hold_up_training_and_its_error_comes_with_the_next_step(tmp_path, capsys):
    release = threading.Event()

    def slow(folder):
        release.wait(60)
        weights(1)(folder)

    with CheckpointManager(tmp_path, async_save=True) as manager:
        began = time.perf_counter()
        assert manager.save(1, slow) is None
        assert time.perf_counter() - began < 20  # the thread waits 60 s unless released
        assert list(manager.list()) == []  # nothing shows before it is whole
        release.set()
        manager.wait()
        assert [p.name for p in manager.list()] == ["checkpoint-1"]
        manager.save(2, fails)
        until(lambda: manager.check() or manager.misses == 1)
        assert "checkpoint-2 was not written" in capsys.readouterr().err
        manager.save(3, weights(3))
    assert [p.name for p in manager.list()] == ["checkpoint-1", "checkpoint-3"]  # leaving waited for it


def test_leaving_after_a_background_save_that_failed_is_an_error_unless_one_is_on_its_way(tmp_path):
    def run(crash: bool) -> None:
        with CheckpointManager(tmp_path, async_save=True) as manager:
            manager.save(1, fails)
            if crash:
                raise ZeroDivisionError

    with pytest.raises(CheckpointError, match="No space left"):
        run(crash=False)
    with pytest.raises(ZeroDivisionError):
        run(crash=True)
    CheckpointManager(tmp_path).start().close()  # the lock was given back both times


def test_a_mistake_in_the_writer_is_not_taken_for_a_full_disk(tmp_path):
    def wrong(folder):
        raise TypeError("not a tensor")

    with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError):
        manager.save(1, wrong)


def test_going_on_from_an_older_step_keeps_the_later_ones_out_of_the_way(tmp_path, capsys):
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        manager.save(100, weights(100))
        manager.save(200, weights(200))
        manager.save(150, weights(150))
        assert manager.latest_good() == tmp_path / "checkpoint-150"
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-150", "checkpoint-200.aside-1"]
    assert "kept as checkpoint-200.aside-1" in capsys.readouterr().err


def foreign(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model_state.pdparams").write_bytes(b"years of work")
    return folder


def test_a_folder_without_a_manifest_is_never_renamed_replaced_or_deleted(tmp_path, capsys):
    for step in (1, 5, 9):
        foreign(tmp_path / f"checkpoint-{step}")
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        assert manager.latest_good() is None
        manager.begin(None)
        assert manager.save(5, weights(5)) is None
        for step in (6, 7, 8):
            assert manager.save(step, weights(step))
        assert manager.latest_good() == tmp_path / "checkpoint-8"
    said = capsys.readouterr().err
    assert "checkpoint-9 is passed over: checkpoint-9 has no MANIFEST.json" in said
    assert "checkpoint-5 was not written: a folder of that name is there" in said
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 5, 7, 8, 9)]
    for step in (1, 5, 9):
        assert [p.name for p in (tmp_path / f"checkpoint-{step}").iterdir()] == ["model_state.pdparams"]


def test_folders_without_a_manifest_ahead_of_the_run_are_refused_by_name_before_it_begins(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, weights(4))
        foreign(tmp_path / "checkpoint-2")
        manager.refuse_foreign(tmp_path / "checkpoint-4")
        with pytest.raises(CheckpointError, match="checkpoint-2 in output_dir: no MANIFEST"):
            manager.refuse_foreign(None)
        foreign(tmp_path / "checkpoint-6")
        with pytest.raises(CheckpointError, match="checkpoint-6 in output_dir") as caught:
            manager.refuse_foreign(tmp_path / "checkpoint-4")
    assert "delete" not in caught.value.fix


def test_a_run_that_begins_keeps_aside_what_is_of_another_branch_or_run(tmp_path, capsys):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        for step in (2, 4, 6, 8):
            manager.save(step, weights(step))
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        manager.begin(tmp_path / "checkpoint-8")
        assert capsys.readouterr().err == ""
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        manager.begin(tmp_path / "checkpoint-2")
        manager.save(4, lambda folder: (folder / "model.txt").write_text("another branch") and None)
        said = capsys.readouterr().err
        for step in (4, 6, 8):
            kept = tmp_path / f"checkpoint-{step}.aside-1"
            assert (kept / "model.txt").read_text() == f"weights of {step}"
            assert f"kept as {kept.name}" in said
        assert manager.save(4, weights(4)), "its own step may be saved again"
    assert [n for n in names(tmp_path) if n.startswith("checkpoint-4")] == ["checkpoint-4", "checkpoint-4.aside-1"]
    for point in (None, tmp_path / "elsewhere" / "checkpoint-4"):
        with CheckpointManager(tmp_path, keep_last=None) as manager:
            manager.begin(point)
            assert list(manager.list()) == []
            manager.save(4, weights(4))


def test_a_checkpoint_of_the_same_step_that_this_run_did_not_write_is_kept(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, weights(4))
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, lambda folder: (folder / "model.txt").write_text("another run") and None)
    assert (tmp_path / "checkpoint-4.aside-1" / "model.txt").read_text() == "weights of 4"
    assert (tmp_path / "checkpoint-4" / "model.txt").read_text() == "another run"


def test_the_best_stays_protected_while_the_save_of_a_better_one_fails(tmp_path):
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        manager.save(1, weights(1))
        manager.protect(1)
        manager.protect(2)
        assert manager.save(2, fails) is None
        for step in (3, 4, 5):
            manager.save(step, weights(step))
        assert names(tmp_path) == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]
        manager.protect(6)
        for step in (6, 7, 8):
            manager.save(step, weights(step))
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-7", "checkpoint-8"]


def test_a_restart_finds_what_its_own_launch_saved(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        manager.save(8, weights(8), {"launch": "yesterday"})
        assert manager.latest_good("today") is None
        manager.begin(None)
        manager.save(2, weights(2), {"launch": "today"})
        assert manager.latest_good("today") == tmp_path / "checkpoint-2"
        assert manager.latest_good("tomorrow") is None


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(tmp_path, monkeypatch, capsys):
    class Stuck(writer.FileOps):
        def rename(self, source, target):
            if target.name.startswith(".del-"):
                raise OSError(16, "Device or resource busy")
            super().rename(source, target)

    monkeypatch.setattr(writer, "ops", Stuck())
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for step in (1, 2, 3):
            assert manager.save(step, weights(step))
        assert manager.misses == 0
    assert "could not delete the old checkpoint-1: Device or resource busy" in capsys.readouterr().err


def test_starting_sweeps_what_a_killed_run_left(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, weights(1))
    for kind in ("tmp", "del"):
        left = writer.hidden(tmp_path, kind, "checkpoint-2")
        left.mkdir()
        (left / "model.txt").write_text("half")
    CheckpointManager(tmp_path).start().close()
    assert names(tmp_path) == ["checkpoint-1"]
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / MANIFEST).exists()


def test_a_start_that_cannot_restore_a_folder_says_so_and_gives_the_lock_back(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, weights(1))
    (tmp_path / "checkpoint-1").rename(writer.hidden(tmp_path, "old", "checkpoint-1"))

    class ReadOnly(writer.FileOps):
        def rename(self, source, target):
            raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "ops", ReadOnly())
        with pytest.raises(CheckpointError, match="Read-only file system"):
            CheckpointManager(tmp_path).start()
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_good() == tmp_path / "checkpoint-1"


def test_a_second_manager_on_the_same_folder_is_refused(tmp_path):
    with CheckpointManager(tmp_path), pytest.raises(CheckpointError, match="another run is training into"):
        CheckpointManager(tmp_path).start()
