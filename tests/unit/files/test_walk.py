"""What in a tree is not ours, before a whole folder of ours is deleted."""

from __future__ import annotations

from pathlib import Path

from erniekit.checkpoint.writer import publish
from erniekit.files import OwnedFiles, own
from erniekit.files.walk import foreign_files


def names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in foreign_files(folder)]


def a_run(folder: Path) -> Path:
    OwnedFiles(folder).open("run")
    own(folder / "run.json").write_text("{}")
    publish(folder, "checkpoint-2", lambda tmp: (tmp / "w.safetensors").write_bytes(b"12") and None)
    (folder / ".erniekit.lock").write_text("")
    return folder


def test_a_run_as_we_left_it_holds_nothing_foreign(tmp_path: Path) -> None:
    assert names(a_run(tmp_path / "run")) == []


def test_a_file_beside_ours_and_one_inside_a_checkpoint_are_foreign(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    (run / "checkpoint-2" / "mine.txt").write_text("mine")
    (run / "deep" / "er").mkdir(parents=True)
    (run / "deep" / "er" / "x").write_text("mine")
    assert names(run) == ["checkpoint-2/mine.txt", "deep/er/x", "notes.txt"]


def test_links_are_foreign_and_not_followed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    (run / "link").symlink_to(tmp_path / "other")
    (run / "link.txt").symlink_to(tmp_path / "other" / "file")
    assert names(run) == ["link", "link.txt"]


def test_a_checkpoint_file_of_another_size_is_foreign(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "checkpoint-2" / "w.safetensors").write_bytes(b"123")
    assert names(run) == ["checkpoint-2/w.safetensors"]
