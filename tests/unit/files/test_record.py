"""The record of what we wrote: only listed, unchanged plain files are ever replaced or deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from erniekit.checkpoint.published import check_published
from erniekit.files import RECORD, NotOurs, OwnedFiles, own, settle
from erniekit.files.output import check_output
from erniekit.files.record import Content, content_of
from erniekit.files.walk import foreign_files


def test_a_file_that_was_there_before_is_never_claimed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(NotOurs, match=r"run\.json exists"):
        own(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == "mine"
    assert not OwnedFiles(tmp_path).is_ours("run.json")


def test_a_claimed_file_may_be_rewritten_and_removed(tmp_path: Path) -> None:
    own(tmp_path / "run.json").write_text("one")
    own(tmp_path / "run.json").write_text("two")
    owned = OwnedFiles(tmp_path)
    assert owned.remove("run.json")
    assert not (tmp_path / "run.json").exists()
    (tmp_path / "run.json").write_text("a user's, made after ours was removed")
    assert not owned.remove("run.json")


def test_a_link_is_never_ours_even_under_a_claimed_name(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.txt"
    target.write_text("precious")
    folder = tmp_path / "run"
    OwnedFiles(folder).claim("metrics.jsonl")
    (folder / "metrics.jsonl").symlink_to(target)
    with pytest.raises(NotOurs):
        own(folder / "metrics.jsonl")
    assert not OwnedFiles(folder).remove("metrics.jsonl")
    assert target.read_text() == "precious"


def test_a_record_that_is_a_link_is_neither_read_nor_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text('{"folder": "run"}\n{"name": "x"}\n')
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / RECORD).symlink_to(other)
    assert OwnedFiles(folder).purpose() == ""
    with pytest.raises(OSError):
        OwnedFiles(folder).claim("y")
    assert other.read_text().count("\n") == 2


def test_content_that_was_changed_since_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    owned = OwnedFiles(tmp_path / "out")
    owned.claim_content({"config.json": content_of(path)}, "model")
    (owned.folder / "config.json").write_text("{}")
    assert owned.is_ours("config.json")
    os.utime(owned.folder / "config.json", ns=(1, 1))  # another time alone does not make it another content
    assert owned.is_ours("config.json")
    (owned.folder / "config.json").write_text("[]")
    assert not owned.is_ours("config.json")
    with pytest.raises(NotOurs):
        owned.claim_content({"config.json": Content(9, "other")}, "model")


def test_while_one_content_replaces_another_both_are_ours(tmp_path: Path) -> None:
    """A kill between the record's line and the rename leaves the old content under the name."""
    new = tmp_path / "new"
    new.write_text("new")
    (tmp_path / "old").write_text("old")
    owned = OwnedFiles(tmp_path / "out")
    owned.claim_content({"w": content_of(tmp_path / "old")}, "model")
    (owned.folder / "w").write_text("old")
    owned.claim_content({"w": content_of(new)}, "model")
    assert owned.is_ours("w")
    (owned.folder / "w").write_text("new")
    assert owned.is_ours("w")


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    owned = OwnedFiles(tmp_path).open("run")
    owned.claim("a")
    with (tmp_path / RECORD).open("a") as record:
        record.write('{"name": "b')
    owned.claim("c")
    assert set(owned.entries()) == {"a", "c"}
    assert owned.purpose() == "run"


@pytest.mark.parametrize("text", ["\x00\xff", "[[[[", '{"name": 3}', '{"name": "x", "sha256": 1}', '{"folder": []}'])
def test_a_record_of_nonsense_owns_nothing_and_does_not_crash(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    (tmp_path / "x").write_text("mine")
    assert not OwnedFiles(tmp_path).remove("x")


@pytest.mark.parametrize("name", ["model\0", "model\ud800", "model" * 60, "model/x" * 600, "model/../../x", "/model"])
def test_a_name_that_no_file_can_have_is_passed_over(tmp_path: Path, name: str) -> None:
    """The record may be anyone's; such a name reached the system before."""
    name += ".safetensors"
    lines = [{"folder": "run"}, {"name": name, "open": True}, {"name": name, "size": 1, "sha256": "ab" * 32}]
    (tmp_path / RECORD).write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"name": "run.json"}]))
    (tmp_path / "run.json").write_text("{}")
    assert set(OwnedFiles(tmp_path).entries()) == {"run.json"}
    assert list(foreign_files(tmp_path)) == []
    assert check_published(tmp_path).whole
    check_output(tmp_path, {}, {})
    assert not OwnedFiles(tmp_path).remove(name)


def test_a_file_whose_name_is_not_utf_8_is_ours_once_it_is_claimed(tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xfcn.log")
    own(tmp_path / name).write_text("ours")
    assert OwnedFiles(tmp_path).is_ours(name)
    own(tmp_path / name).write_text("ours, too")


def test_a_file_written_to_its_end_is_ours_only_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    path = own(tmp_path / "report.html")
    path.write_text("ours")
    path.write_text("ours, rewritten while the run goes on")
    settle(own(path))
    assert OwnedFiles(tmp_path).is_ours(path.name)
    path.write_text("with a user's notes")
    with pytest.raises(NotOurs):
        own(path)
    assert not OwnedFiles(tmp_path).remove(path.name)


def test_a_record_shared_by_a_hard_linked_backup_stays_as_it_was_there(tmp_path: Path) -> None:
    OwnedFiles(tmp_path / "run").claim("a")
    os.link(tmp_path / "run" / RECORD, tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    OwnedFiles(tmp_path / "run").claim("b")
    assert (tmp_path / "backup").read_bytes() == before
    assert set(OwnedFiles(tmp_path / "run").entries()) == {"a", "b"}


def test_a_pipe_in_the_place_of_the_record_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(OSError, match="not a plain file"):
        OwnedFiles(tmp_path).claim("a")
