"""The JSON schema of recipes is the declared keys, and every recipe there is passes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema_rs import Draft7Validator

from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.flat import KEYS
from erniekit.config.schema import recipe_schema
from erniekit.errors import ConfigError


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    return Draft7Validator(recipe_schema())


def test_the_committed_schema_is_what_the_command_prints(root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == recipe_schema()
    fix = "erniekit config --schema > docs/recipe.schema.json"
    assert (root / "docs" / "recipe.schema.json").read_text(encoding="utf-8") == printed, fix


def test_every_key_has_its_help_its_choices_and_its_default_in_it():
    found = recipe_schema()["properties"]
    for name, k in KEYS.items():
        assert found[name]["description"].startswith(k.help)
        offered = [word for kind in found[name]["anyOf"] for word in kind.get("enum", ())]
        assert set(k.choices) <= set(offered)
        if k.default not in (None, ()):
            assert found[name]["default"] == (list(k.default) if isinstance(k.default, tuple) else k.default)


def test_every_example_recipe_passes(root: Path, validator: Draft7Validator):
    recipes = sorted((root / "examples").rglob("*.yaml"))
    assert len(recipes) > 100
    for path in recipes:
        wrong = [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))]
        assert wrong == [], path


def test_every_default_passes(validator: Draft7Validator):
    defaults = {name: list(k.default) if isinstance(k.default, tuple) else k.default for name, k in KEYS.items()}
    assert [error.message for error in validator.iter_errors(defaults)] == []


# Both answers agree on each: what a person may write, and what is a mistake.
WRITTEN: list[tuple[str, Any]] = [
    ("max_steps", 3),
    ("max_steps", "3"),
    ("max_steps", "three"),
    ("max_steps", True),
    ("learning_rate", "5e-7"),
    ("learning_rate", [1]),
    ("lora_rank", -4),
    ("recompute", "on"),
    ("recompute", 1),
    ("recompute", "maybe"),
    ("stage", "sft"),
    ("stage", "SFTT"),
    ("report_to", ["tensorboard", "wandb"]),
    ("sharding", ["stage4"]),
    ("report_to", None),
    ("logging_strategy", False),
    ("model_config", {"num_hidden_layers": 2}),
    ("model_config", 3),
    ("run_name", 7),
    ("max_stepz", 3),
]


@pytest.mark.parametrize(("name", "value"), WRITTEN, ids=lambda part: str(part))
def test_schema_and_reader_accept_and_refuse_the_same(name: str, value: Any, validator: Draft7Validator):
    try:
        load([], "config", {name: value})
        read = True
    except ConfigError:
        read = False
    assert validator.is_valid(json.loads(json.dumps({name: value}))) is read
