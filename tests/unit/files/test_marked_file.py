"""Files of ours beside a user's own: known again until somebody edits them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from erniekit.files.marked_file import state_of, write_marked

MARK = "# written by `erniekit plan`"


@pytest.mark.parametrize("mark", [MARK, "<!-- written by `erniekit`"])
def test_a_file_is_ours_until_it_is_edited(mark: str, tmp_path: Path) -> None:
    target = tmp_path / "made"
    assert state_of(target, mark) == "absent"
    write_marked(target, mark, " for 2 H200", "one\ntwo ü\n", lambda: None)
    assert state_of(target, mark) == "ours"
    text = target.read_text()
    for changed in (
        text + "three\n",
        text.replace("two", "2"),
        text.replace("2 H200", "2 H200, my notes"),
        text.replace("\n", "\r\n"),
    ):
        target.write_text(changed, newline="")
        assert state_of(target, mark) == "edited"
    for other in ("mine", text.replace("written by", "edited by")):
        target.write_text(other)
        assert state_of(target, mark) == "foreign"


def test_a_link_to_a_file_of_ours_and_a_folder_are_foreign(tmp_path: Path) -> None:
    write_marked(tmp_path / "made", MARK, "", "body\n", lambda: None)
    (tmp_path / "link").symlink_to(tmp_path / "made")
    (tmp_path / "loose").symlink_to(tmp_path / "gone")
    for other in ("link", "loose", "."):
        assert state_of(tmp_path / other, MARK) == "foreign"


@pytest.mark.parametrize("link", [False, True])
def test_no_name_beside_it_is_anybodys(tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process whose number another machine gave out, too, or that somebody foresaw."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "ab" * size)
    mine, taken = tmp_path / "mine", tmp_path / f".made.{os.getpid()}"
    mine.write_text("mine")
    for name in (taken.name, f"{taken.name}-abababab"):
        (tmp_path / name).symlink_to(mine) if link else (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError):
        write_marked(tmp_path / "made", MARK, "", "body\n", lambda: None)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: "mine" for name in ("mine", taken.name, f"{taken.name}-abababab")
    }


def test_what_was_edited_meanwhile_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.write_text("mine")

    def refuse() -> None:
        raise ValueError("edited")

    with pytest.raises(ValueError, match="edited"):
        write_marked(target, MARK, "", "body\n", refuse)
    assert target.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
