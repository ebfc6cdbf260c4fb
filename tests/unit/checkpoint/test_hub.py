"""A model named by folder or by hub id: found here, found in the cache, or refused with the command that fetches it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from erniekit.checkpoint.hub import resolve_model
from erniekit.errors import CheckpointError

NAME = "baidu/ERNIE-4.5-0.3B-PT"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> Path:
    """HF_HOME in a folder of our own, and no folder of the hub id below the working directory."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def put(folder: Path, file: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("{}")
    return folder


def cached(hub: Path, commit: str, age: float = 0.0) -> Path:
    folder = put(hub / "models--baidu--ERNIE-4.5-0.3B-PT" / "snapshots" / commit)
    os.utime(folder, (1e9 - age, 1e9 - age))
    return folder


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_folder_is_taken_as_typed(tmp_path, file):
    assert resolve_model(str(put(tmp_path / "model", file))) == tmp_path / "model"


def test_a_folder_spelt_like_a_hub_id_wins_over_the_cache(tmp_path, empty_cache):
    cached(empty_cache, "aaaa")
    put(tmp_path / "baidu" / "ERNIE-4.5-0.3B-PT")
    assert resolve_model(NAME) == Path(NAME)


def test_a_hub_id_finds_the_snapshot_main_points_to(empty_cache):
    cached(empty_cache, "newer", age=0)
    wanted = cached(empty_cache, "older", age=100)
    refs = empty_cache / "models--baidu--ERNIE-4.5-0.3B-PT" / "refs"
    refs.mkdir()
    (refs / "main").write_text("older\n")
    assert resolve_model(NAME) == wanted


def test_without_a_ref_the_newest_complete_snapshot_is_taken(empty_cache):
    cached(empty_cache, "old", age=100)
    wanted = cached(empty_cache, "new", age=50)
    (cached(empty_cache, "halfway", age=0) / "config.json").unlink()
    assert resolve_model(NAME) == wanted


def test_hf_hub_cache_names_the_cache_folder_directly(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    wanted = cached(tmp_path / "elsewhere", "aaaa")
    assert resolve_model(NAME) == wanted


@pytest.mark.parametrize(
    ("hub", "command"),
    [
        (None, f"hf download {NAME}"),
        ("huggingface", f"hf download {NAME}"),
        ("modelscope", f"modelscope download --model {NAME}"),
        ("aistudio", f"aistudio download --model {NAME}"),
    ],
)
def test_an_absent_hub_id_is_an_error_with_the_download_command(hub, command):
    with pytest.raises(CheckpointError) as caught:
        resolve_model(NAME, hub)
    assert command in caught.value.fix


@pytest.mark.parametrize("typed", ["./models/ernie", "/nowhere/ernie", "~/no such folder", "a/b/c"])
def test_an_absent_path_is_not_taken_for_a_hub_id(typed):
    with pytest.raises(CheckpointError) as caught:
        resolve_model(typed)
    assert caught.value.fix == "check the path"


def test_a_folder_without_config_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"without config\.json"):
        resolve_model(str(put(tmp_path / "weights", "model.safetensors")))


def test_a_file_in_the_place_of_a_model_is_refused_with_its_folder(tmp_path):
    folder = put(tmp_path / "model", "config.json")
    with pytest.raises(CheckpointError, match="is a file") as caught:
        resolve_model(str(folder / "config.json"))
    assert caught.value.fix == f"name its folder: {folder}"
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("typed", [None, ""])
def test_no_model_at_all_names_the_key(typed):
    with pytest.raises(CheckpointError) as caught:
        resolve_model(typed)
    assert caught.value.where == "model_name_or_path"
