"""`sft_benchmark`: a run for its speed alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest


def test_a_benchmark_prints_its_rate_and_saves_nothing_on_the_way(
    train: Callable, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = dict(save_steps=1, eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=1, doctor="off")
    result = train(tmp_path / "run", sft_benchmark=True, max_steps=3, **keys)
    told = re.search(r"([0-9,]+) effective tokens/s", capsys.readouterr().out)
    assert told
    assert int(told[1].replace(",", "")) > 0
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert "eval_loss" not in result.metrics


def test_asking_a_cpu_for_the_same_bits_changes_none(train: Callable, weights: Callable, tmp_path: Path) -> None:
    for name, same in (("plain", False), ("same", True)):
        train(tmp_path / name, deterministic=same, max_steps=2, doctor="off")
    assert weights(tmp_path / "plain") == weights(tmp_path / "same")
