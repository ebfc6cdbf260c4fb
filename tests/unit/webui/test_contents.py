"""What lies behind a path is looked at within bounds, however hostile the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from erniekit.errors import ConfigError
from erniekit.webui import contents
from erniekit.webui.contents import adapter_bases, file_lines, links_in, token_files


def test_links_are_found_at_any_depth_and_a_loop_ends(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefgh")
    deep.mkdir(parents=True)
    (deep / "out").symlink_to("/etc/passwd")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    found, whole = links_in(tmp_path, lambda real: True)
    assert {path.name for path in found} == {"out", "loop"}
    assert whole
    assert links_in(tmp_path / "none", lambda real: True) == ([], True)


def test_what_lies_behind_a_link_to_a_folder_inside_is_looked_at_and_never_one_outside(tmp_path: Path) -> None:
    for name in ("model", "inside", "outside"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / f"link-in-{name}").symlink_to("/etc/passwd")
    (tmp_path / "model" / "to-inside").symlink_to(tmp_path / "inside")
    (tmp_path / "model" / "to-outside").symlink_to(tmp_path / "outside")
    found, whole = links_in(tmp_path / "model", lambda real: "outside" not in real.parts)
    assert {path.name for path in found} == {"link-in-model", "to-inside", "to-outside", "link-in-inside"}
    assert whole


def test_a_folder_with_more_than_is_looked_at_says_so_and_its_upper_levels_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_ENTRIES", 6)
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "link").symlink_to("/etc")
    assert links_in(tmp_path, lambda real: False) == ([tmp_path / "link"], False)


def test_lists_are_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list"
    path.write_text(" a \n\nb c\n")
    assert file_lines(path, "data_filelist") == ["a", "b c"]
    monkeypatch.setattr(contents, "MAX_LINES", 1)
    with pytest.raises(ConfigError, match="too long"):
        file_lines(path, "data_filelist")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="as text"):
        file_lines(path, "data_filelist")


def test_the_files_of_a_prefix_are_named_by_it_or_by_one_of_them(tmp_path: Path) -> None:
    for name in ("x.bin", "x.idx", "y_ids.npy"):
        (tmp_path / name).write_text("")
    both = [tmp_path / "x.bin", tmp_path / "x.idx"]
    assert token_files(tmp_path / "x") == both
    assert token_files(tmp_path / "x.idx") == both
    assert token_files(tmp_path / "y") == [tmp_path / "y_ids.npy"]
    os.symlink("/nowhere", tmp_path / "z.bin")
    assert token_files(tmp_path / "z") == [tmp_path / "z.bin"], "a link counts wherever it leads"


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"base_model_name_or_path": 1}', "{}", "\x00"])
def test_an_adapter_that_names_no_base_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    assert adapter_bases(tmp_path) == []


def test_the_bases_of_adapters_and_of_their_checkpoints_are_found(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    for folder, name, base in ((".", "adapter_config.json", "a"), ("checkpoint-1", "lora_config.json", "b")):
        (tmp_path / folder / name).write_text(json.dumps({"base_model_name_or_path": base}))
    assert [base for _, base in adapter_bases(tmp_path)] == ["a", "b"]
    assert adapter_bases(tmp_path / "none") == []
