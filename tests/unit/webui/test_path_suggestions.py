"""What fields that name files offer: models, runs and datasets of the roots, and not what only looks like them."""

from __future__ import annotations

from pathlib import Path

from erniekit.webui.path_suggestions import MAX_DEPTH, suggest_paths
from erniekit.webui.paths import Roots


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_models_adapters_and_datasets_are_found_by_what_lies_in_their_folders(tmp_path: Path) -> None:
    base, adapter = tmp_path / "models" / "base", tmp_path / "out" / "style"
    touch(base / "config.json", base / "model.safetensors", adapter / "lora_config.json", adapter / "peft.safetensors")
    touch(tmp_path / "data" / "rows.jsonl", tmp_path / "data" / "notes.txt", tmp_path / "top.jsonl")
    offers = suggest_paths(Roots([tmp_path]))
    assert offers["model_name_or_path"] == ["models/base"], "an adapter is no base"
    assert offers["lora_path"] == ["out/style"]
    assert offers["output_dir"] == ["out/style", "models/base"]
    assert offers["train_dataset_path"] == ["top.jsonl", "data/rows.jsonl"]


def test_a_runs_own_files_and_hidden_folders_are_no_datasets(tmp_path: Path) -> None:
    touch(tmp_path / "run" / "run.json", tmp_path / "run" / "metrics.jsonl", tmp_path / ".cache" / "rows.jsonl")
    touch(tmp_path / "erniekit-webui" / "jobs" / "1" / "rows.jsonl")
    assert suggest_paths(Roots([tmp_path]))["train_dataset_path"] == []


def test_links_are_not_followed_and_depth_has_an_end(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    touch(outside / "rows.jsonl", root.joinpath(*map(str, range(MAX_DEPTH + 1)), "deep.jsonl"))
    (root / "link").symlink_to(outside)
    assert suggest_paths(Roots([root]))["train_dataset_path"] == []


def test_folders_of_further_roots_are_named_in_full(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    touch(second / "rows.jsonl")
    first.mkdir()
    assert suggest_paths(Roots([first, second]))["train_dataset_path"] == [str(second / "rows.jsonl")]
