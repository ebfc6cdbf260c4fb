"""What a run folder says of how it was started: no secret, and nothing that a folder's name could add to a recipe."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from erniekit.config import load
from erniekit.log import without_secrets
from erniekit.recipes.repeat import checkout_of, recipe_of, variables
from erniekit.track.runfile import RunRecord


def test_variables_that_hold_a_secret_are_not_recorded():
    given = {
        "ERNIEKIT_API_KEY": "a", "ERNIEKIT_WEBUI_TOKEN": "b", "NCCL_SOME_SECRET": "c", "ERNIEKIT_CACHE": "d",
        "NCCL_DEBUG": "e", "AWS_SECRET_ACCESS_KEY": "f",
    }  # fmt: skip
    assert variables(given) == {"ERNIEKIT_CACHE": "d", "NCCL_DEBUG": "e"}


@pytest.mark.parametrize("words", [["wandb_http_proxy=http://u:pw@h"], ["--wandb-http-proxy", "http://u:pw@h"]])
def test_a_proxy_with_its_password_is_no_part_of_a_recorded_command(words: list[str]):
    assert "pw" not in " ".join(without_secrets(["erniekit", "train", *words]))


def test_a_key_of_the_command_line_is_not_in_run_json(tmp_path: Path):
    record = RunRecord(
        tmp_path, command=["erniekit", "train", "wandb_api_key=hush", "--wandb_api_key", "hush"], version="1"
    )
    record.describe()
    assert "erniekit train" in (tmp_path / "run.json").read_text()
    assert "hush" not in (tmp_path / "run.json").read_text()


def test_a_folders_name_adds_no_key_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "a\nlearning_rate: 7\u2028seed: 8"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cfg = load(["max_steps=3"], "train")
    text = "\n".join(recipe_of(cfg, ["erniekit", "train", "data=x\rseed: 9", "output_dir=b\x85seed: 10"]))
    assert yaml.safe_load(text) == {"max_steps": 3}


def test_a_checkout_is_named_by_its_commit_and_dirty_once_a_file_has_changed(tmp_path: Path):
    assert checkout_of(tmp_path) is None
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "a.txt"], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = checkout_of(tmp_path / "deep")
    assert clean is not None
    assert clean.top == tmp_path.resolve()
    assert clean.commit == clean.head != ""
    (tmp_path / "a.txt").write_text("2")
    changed = checkout_of(tmp_path)
    assert changed is not None
    assert changed.commit == f"{clean.head}.dirty"
