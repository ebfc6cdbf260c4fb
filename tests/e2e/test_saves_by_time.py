"""`save_minutes`: a checkpoint when time has passed, whatever save_steps says; unless told not to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.checkpoint import manifest
from erniekit.config import load
from erniekit.recipes.save_times import minutes_between_saves
from support.plain_adamw import results_come_late

ALWAYS = 1e-6  # minutes: after every step


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in r]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late results"])
def test_time_alone_brings_checkpoints_and_changes_no_bit(
    late: bool, train: Callable, weights: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        results_come_late(monkeypatch)
    keys: dict[str, Any] = dict(max_steps=4, doctor="off", gradient_accumulation_steps=1, save_steps=10_000_000)
    train(tmp_path / "timed", save_minutes=ALWAYS, **keys)
    train(tmp_path / "plain", save_minutes=0, **keys)
    assert checkpoints(tmp_path / "plain") == ["checkpoint-4"]
    assert checkpoints(tmp_path / "timed") == ["checkpoint-3", "checkpoint-4"], "older ones made room"
    assert manifest.load(tmp_path / "timed" / "checkpoint-3").info["timed"] is True
    events = json.loads((tmp_path / "timed" / "run.json").read_text())["events"]
    assert [e["step"] for e in events if e["name"] == "save"] == [1, 2, 3, 4]
    assert losses(tmp_path / "timed") == losses(tmp_path / "plain")
    assert weights(tmp_path / "timed") == weights(tmp_path / "plain")


def test_checkpoints_of_the_schedule_stay_beside_those_of_the_clock(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "run", save_minutes=ALWAYS, save_steps=2, max_steps=7, doctor="off", gradient_accumulation_steps=1)
    assert checkpoints(tmp_path / "run") == [f"checkpoint-{step}" for step in (2, 4, 6, 7)]
    assert "saves    every 2 steps, every 1e-06 minutes (save_minutes), at the end" in capsys.readouterr().out


def test_whoever_asks_for_no_saves_gets_none_by_time_unless_they_name_the_minutes(
    train: Callable, tmp_path: Path
) -> None:
    keys = dict(save_strategy="no", max_steps=3, doctor="off")
    train(tmp_path / "none", **keys)
    assert checkpoints(tmp_path / "none") == ["checkpoint-3"]
    train(tmp_path / "asked", save_minutes=ALWAYS, save_total_limit=3, **keys)
    assert checkpoints(tmp_path / "asked") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_recipes_that_save_at_step_ten_million_save_every_quarter_of_an_hour(root: Path) -> None:
    recipe = load([str(root / "examples/configs/ERNIE-4.5-0.3B/sft/run_sft_8k.yaml")], "train")
    assert recipe.checkpoint.save_steps == 10_000_000
    assert minutes_between_saves(recipe) == 15
    assert minutes_between_saves(recipe.replace(save_strategy="no")) == 0
