"""Files that are uploaded and kept: under names of ours, beside what is there, within limits; and recipes to pick."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import IO

import pytest

from erniekit.errors import DataError
from erniekit.webui import uploads
from erniekit.webui.form_pages import STAGES
from erniekit.webui.forms import from_file, page_of
from erniekit.webui.recipe_files import recipe_files
from erniekit.webui.uploads import DATA, RECIPES, keep

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where gradio puts what it receives."""
    folder = tmp_path / "sent"
    folder.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder))
    return folder


def put(folder: Path, name: str, text: str = "x") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_is_kept_under_its_name_and_never_over_another(sent: Path, tmp_path: Path) -> None:
    first = keep(put(sent, "rows.jsonl", "one"), DATA, tmp_path)
    second = keep(put(sent, "rows.jsonl", "two"), DATA, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in (first, second)] == [
        "data/rows.jsonl",
        "data/rows-2.jsonl",
    ]
    assert (first.read_text(), second.read_text()) == ("one", "two")
    (tmp_path / DATA / "link.jsonl").symlink_to(tmp_path / "elsewhere")
    assert keep(put(sent, "link.jsonl"), DATA, tmp_path).name == "link-2.jsonl"
    assert not (tmp_path / "elsewhere").exists(), "a link is not followed"


@pytest.mark.parametrize(
    "name", ["a.py", "jsonl", ".jsonl", "a.jsonl.exe", "a.yaml", "a.html", "a.zip", "a.jsonl.html", "a.svg", "..jsonl"]
)
def test_other_kinds_of_files_are_refused(name: str, sent: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a file of this kind"):
        keep(put(sent, name), DATA, tmp_path)
    assert not (tmp_path / DATA / name).exists()


def test_names_hold_no_blanks_and_no_signs_that_a_list_of_files_would_be_cut_at(sent: Path, tmp_path: Path) -> None:
    assert keep(put(sent, "my rows, (1).jsonl"), DATA, tmp_path).name == "my-rows-1-.jsonl"
    assert keep(put(sent, "数据.csv"), DATA, tmp_path).name == "数据.csv"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("-rf.jsonl", "rf.jsonl"),
        ("..-.hidden.jsonl", "hidden.jsonl"),
        ("a\nb\tc.jsonl", "a-b-c.jsonl"),
        ("$(id);`id`.jsonl", "id-id-.jsonl"),
        ("a\u202egnp.jsonl", "a-gnp.jsonl"),
        ("..\\..\\x.jsonl", "x.jsonl"),
        ("a" * 130 + "-." + "b" * 100 + ".jsonl", None),
        ("数" * 80 + ".jsonl", None),
    ],
)
def test_hostile_and_endless_names_become_plain_ones_of_this_folder(
    name: str, kept: str | None, sent: Path, tmp_path: Path
) -> None:
    path = keep(put(sent, name), DATA, tmp_path)
    assert path.parent == tmp_path / DATA
    assert path.is_file()
    assert path.suffix == ".jsonl"
    assert kept is None or path.name == kept
    assert not path.name.startswith((".", "-"))
    assert len(os.fsencode(path.name)) <= 255


def test_what_was_not_uploaded_is_too_large_or_has_no_room_is_refused(
    sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="not uploaded"):
        keep(put(tmp_path, "secret.jsonl"), DATA, tmp_path)
    file = put(sent, "rows.jsonl", "x" * 100)
    monkeypatch.setattr(uploads, "MAX_FILE", 99)
    with pytest.raises(DataError, match="100 bytes"):
        keep(file, DATA, tmp_path)
    monkeypatch.setattr(uploads, "MAX_FILE", 100)
    monkeypatch.setattr(uploads, "MAX_FILES", 0)
    with pytest.raises(DataError, match="full"):
        keep(file, DATA, tmp_path)


def test_an_upload_that_could_not_be_copied_whole_is_not_offered(sent: Path, tmp_path: Path, monkeypatch) -> None:
    def full(source: IO[bytes], out: IO[bytes]) -> None:
        out.write(source.read(1))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(DataError, match="No space left"):
        keep(put(sent, "rows.jsonl"), DATA, tmp_path / "home")
    assert not list((tmp_path / "home" / DATA).iterdir())


def test_the_picker_offers_uploads_first_and_every_shipped_recipe_of_training(sent: Path, tmp_path: Path) -> None:
    keep(put(sent, "mine.yaml", "max_steps: 3\n"), RECIPES, tmp_path)
    found = recipe_files(ROOT, tmp_path)
    assert next(iter(found)) == "mine.yaml"
    assert "ERNIE-4.5-0.3B/sft/run_sft_lora_8k" in found
    assert len(found) > 75
    assert not [name for name in found if "export" in name or "chat" in name or "eval" in name]


def test_shipped_recipes_fill_the_form(tmp_path: Path) -> None:
    found = recipe_files(ROOT, tmp_path)
    for name in list(found)[::8]:
        values = from_file(found[name])
        assert page_of("train", values) in STAGES.values(), name


def test_without_a_checkout_only_uploads_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("erniekit.webui.recipe_files.__file__", str(tmp_path / "site" / "erniekit" / "webui" / "x.py"))
    assert recipe_files(tmp_path, tmp_path) == {}
