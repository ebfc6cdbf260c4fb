"""A whole run whose results come after the next step's launch, as on a card: saves and signals notice nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import Preempted
from erniekit.train.metrics import LogHook
from erniekit.train.step import TrainStep
from support.plain_adamw import results_come_late


def logged(folder: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("second", "runtime", "mfu", "memory", "data_wait")
    return [{k: v for k, v in r.items() if not any(word in k for word in timed)} for r in records]


def state(folder: Path) -> dict[str, Any]:
    saved = json.loads((folder / "state.json").read_text())
    return {k: v for k, v in saved.items() if not isinstance(v, dict)}


@pytest.mark.full
def test_saves_and_evaluations_find_the_step_they_belong_to(
    train: Callable, weights: Callable, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_come_late(monkeypatch)
    keys = dict(
        save_steps=4, eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=3, max_steps=7, doctor="off"
    )
    train(tmp_path / "late", **keys)
    monkeypatch.setattr(TrainStep, "late", False)
    train(tmp_path / "at_once", **keys)
    assert logged(tmp_path / "late") == logged(tmp_path / "at_once")
    for step in (4, 7):
        late, at_once = (tmp_path / name / f"checkpoint-{step}" for name in ("late", "at_once"))
        assert weights(late) == weights(at_once)
        assert state(late) == state(at_once)


def test_a_signal_stops_the_run_at_the_step_that_is_under_way_and_it_goes_on_bit_for_bit(
    train: Callable, weights: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_come_late(monkeypatch)
    keys = dict(max_steps=4, gradient_accumulation_steps=1, doctor="off")
    train(tmp_path / "whole", **keys)
    plain = LogHook.after_step

    def stopping(self: LogHook, trainer: Any, result: Any) -> None:
        plain(self, trainer, result)
        if result.step == 1:
            assert trainer.ahead
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LogHook, "after_step", stopping)
        with pytest.raises(Preempted, match="after step 2"):
            train(tmp_path / "cut", **keys)
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    train(tmp_path / "cut", **keys)
    assert weights(tmp_path / "cut" / "checkpoint-4") == weights(tmp_path / "whole" / "checkpoint-4")
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
