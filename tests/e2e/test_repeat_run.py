"""A run folder says all that is needed to repeat the run: from recipe.yaml alone, the same losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.log import without_secrets
from erniekit.recipes.repeat import variables
from erniekit.track import jsonl


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in jsonl.read(folder / jsonl.FILE) if "loss" in row]


@pytest.mark.parametrize(
    "keys", [{}, dict(fine_tuning="LoRA", lora_rank=4, sequence_parallel=True)], ids=["full", "lora"]
)
def test_a_run_is_repeated_from_its_folder_alone(
    keys: dict[str, object],
    train: Callable,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "mine.jsonl").write_bytes(rows.read_bytes())
    train(Path("first"), train_dataset_path="mine.jsonl", max_steps=3, seed=7, doctor="off", **keys)
    first = tmp_path / "here" / "first"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["train", str(first / "recipe.yaml"), "output_dir=again"]) == 0
    assert "has changed" not in capsys.readouterr().out
    assert losses(elsewhere / "again") == losses(first)
    assert len(losses(first)) == 3


def test_a_run_repeated_on_changed_data_names_the_file_once(
    train: Callable, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    text = rows.read_text()
    Path("mine.jsonl").write_text(text)
    Path("other.jsonl").write_text(text)
    data = "mine.jsonl,other.jsonl"
    train(Path("first"), train_dataset_path=data, max_steps=1, train_dataset_prob="0.5,0.5", doctor="off")
    Path("mine.jsonl").write_text(text + text.splitlines()[0] + "\n")
    capsys.readouterr()
    # Other keys of the run may be others: that is not the data's.
    assert main(["train", "first/recipe.yaml", "output_dir=again", "max_seq_len=80"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has changed" in line]
    assert line.startswith(f"note     {tmp_path / 'mine.jsonl'} has changed since first was trained on it: 16 rows")
    assert ", 17 (" in line
    told = json.loads(Path("again/run.json").read_text())
    assert line.removeprefix("note     ") in told["notes"]


def test_the_record_of_a_run_names_code_versions_data_and_variables(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    train(tmp_path / "run", max_steps=1, doctor="off")
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    where = told["environment"]
    assert set(where) >= {"python", "torch", "device", "system", "folder", "packages", "commits", "variables"}
    assert set(where["packages"]) >= {"transformers", "safetensors", "numpy"}
    assert where["variables"]["NCCL_DEBUG"] == "WARN"
    assert told["data"]["digests"]
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "output_dir=NEW" in text


def test_a_recipe_that_the_user_changed_stays_and_the_run_goes_on(train: Callable, tmp_path: Path):
    train(tmp_path / "run", max_steps=1, doctor="off", lr_scheduler_type="constant", warmup_steps=0)
    (tmp_path / "run" / "recipe.yaml").write_text("max_steps: 7\n")
    train(tmp_path / "run", max_steps=2, doctor="off", lr_scheduler_type="constant", warmup_steps=0)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "max_steps: 7\n"
    assert len(losses(tmp_path / "run")) == 2


def test_only_variables_that_matter_are_recorded():
    env = {"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "2", "AWS_SECRET_ACCESS_KEY": "hush", "HOME": "/root"}
    assert variables(env) == {"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "2"}


def test_an_api_key_is_in_no_file_of_a_run(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ERNIEKIT_API_KEY", "hush")
    train(tmp_path / "run", max_steps=1, doctor="off")
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert b"hush" not in file.read_bytes(), file


def test_a_recorded_command_has_neither_keys_nor_proxies():
    typed = ["train", "--wandb_http_proxy", "http://me:hush@proxy", "wandb_api_key=hush", "seed=3"]
    assert without_secrets(typed) == ["train", "--wandb_http_proxy", "***", "wandb_api_key=***", "seed=3"]
