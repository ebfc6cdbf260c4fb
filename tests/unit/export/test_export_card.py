"""The model card of an export: base and licence, data, keys, metrics, use; a user's own README instead of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.export.card import licence_of, model_card
from erniekit.recipes.run import export_command

STORY: dict[str, Any] = {
    "version": "0.1.0",
    "config": [
        {"key": "model_name_or_path", "value": "/somebody/private/place/ERNIE-4.5-0.3B", "origin": "recipe.yaml:1"},
        {"key": "stage", "value": "SFT", "origin": "default"},
        {"key": "fine_tuning", "value": "LoRA", "origin": "default"},
        {"key": "learning_rate", "value": 3e-4, "origin": "default"},
        {"key": "use_dora", "value": True, "origin": "flag --use_dora"},
        {"key": "neftune_noise_alpha", "value": 0.0, "origin": "default"},
        {"key": "loss_type", "value": "sigmoid", "origin": "default"},
        {"key": "wandb_api_key", "value": "***", "origin": "default"},
    ],
    "data": {
        "train": [{"file": "/home/me/my|rows.jsonl", "rows": 1200, "bad": {"json": 3}, "tokens": 45678}],
        "eval": [],
    },
    "metrics": {"train_loss": 0.1234567, "global_step": 30, "train_runtime": 12.5},
}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(STORY))
    return folder


def test_the_card_tells_base_licence_data_keys_metrics_and_no_private_path(trained: Path, tmp_path: Path):
    base = tmp_path / "ERNIE-4.5-0.3B"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# ERNIE\n")
    card = model_card("export", base, [trained])
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "transformers", "license": "apache-2.0", "tags": ["erniekit", "sft", "lora"]}
    for line in (
        "# my-run",
        "- Base model: ERNIE-4.5-0.3B",
        "- Licence of the base: apache-2.0",
        "| my\\|rows.jsonl | train | 1,200 | 3 | 45,678 |",
        "| learning_rate | 0.0003 |",
        "| train_loss | 0.123457 |",
        "| train_runtime (seconds) | 12.5 |",
        "erniekit chat export",
    ):
        assert line in card.splitlines()
    assert model_card("mine", base, [trained]).splitlines()[6] == "# mine", "a name that somebody chose"
    assert "| use_dora | True |" in card, "a method that the run chose"
    assert "neftune_noise_alpha" not in card
    assert "loss_type" not in card, "a key of DPO"
    assert "/home/me" not in card
    assert "/somebody" not in card
    assert "api_key" not in card


def test_a_licence_that_is_nowhere_is_said_to_be_unknown(trained: Path, tmp_path: Path):
    assert licence_of(tmp_path / "absent") is None
    assert "not stated in the base's folder" in model_card("export", tmp_path / "absent", [trained])
    (tmp_path / "LICENSE").write_text("\n   Apache License\n   Version 2.0, January 2004\n")
    assert licence_of(tmp_path) == "apache-2.0"


def test_a_readme_of_the_users_own_goes_with_the_model(trained: Path, tmp_path: Path):
    (trained / "README.md").write_text("# Mine\n")
    assert model_card("export", tmp_path, [trained]) == "# Mine\n"


def test_a_damaged_record_makes_a_short_card_and_no_error(trained: Path, tmp_path: Path):
    (trained / "run.json").write_text('{"config": [1, {"key": "stage"')
    assert "one LoRA adapter merged" in model_card("export", tmp_path, [trained])
    (trained / "run.json").write_text('{"config": 7, "data": [], "metrics": 3}')
    assert "## Use" in model_card("export", tmp_path, [trained])


def test_an_export_holds_its_card_and_an_unchanged_one_is_replaced(run: Path, base: Path):
    words = [f"output_dir={run}", f"model_name_or_path={base}", "lora=True"]
    assert export_command(words) == 0
    text = (run / "export" / "README.md").read_text()
    assert "one LoRA adapter merged" in text
    assert "README.md" in json.loads((run / "export" / "MANIFEST.json").read_text())["files"]
    assert export_command(words) == 0


def test_a_run_json_of_another_adds_nothing_to_the_front_and_a_urls_signature_is_left_out(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    keys = [{"key": "stage", "value": "sft]\nlicense: mit\n---\n# other"}]
    data = {"train": [{"file": "https://me:pw@host/rows.jsonl?X-Signature=secret", "rows": 1}]}
    (folder / "run.json").write_text(json.dumps({"version": "1\n# other", "config": keys, "data": data}))
    card = model_card("export", tmp_path / "base", [folder])
    assert yaml.safe_load(card.split("---")[1]) == {"library_name": "transformers", "tags": ["erniekit"]}
    assert "# other" not in card.splitlines()
    assert "| rows.jsonl | train | 1 |" in card
    assert "secret" not in card
