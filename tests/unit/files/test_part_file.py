"""Files that are whole or absent: whatever text they are given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from erniekit.checkpoint import shards
from erniekit.files.part_file import part_file, part_of
from erniekit.track import atomic


@pytest.mark.parametrize("write_json", [atomic.write_json, shards.write_json])
def test_a_path_that_is_not_utf_8_comes_back_from_json_as_it_was(write_json, tmp_path: Path) -> None:
    name = os.fsdecode(b"rows-\xff-\xe4.jsonl")
    write_json(tmp_path / "run.json", {"data": name, "text": "\u6587\u5b57"})
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert "rows-\\udcff-\\udce4.jsonl" in text
    assert "\u6587\u5b57" in text, "what is text stays readable"
    assert json.loads(text)["data"] == name


def test_a_file_that_fails_half_way_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("old")

    def half() -> None:
        with part_file(file) as out:
            out.write("new")
            assert part_of(file).exists(), "it is written beside its place"
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        half()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
