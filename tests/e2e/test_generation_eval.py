"""Answers generated during training: deterministic, in file, log and report, and without a trace in the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.preference import PairSample
from erniekit.data.types import IGNORE, Sample
from erniekit.errors import ConfigError
from erniekit.recipes.generation_eval import GeneratedAnswer, prompt_of
from support.jsonl import small_row, write_jsonl


def logged(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r[name] for r in map(json.loads, lines) if name in r]


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("tuning", [pytest.param("Full", marks=pytest.mark.full), "LoRA"])
def test_training_is_the_same_bit_for_bit_with_and_without_it(
    tuning: str, train: Callable, weights: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    held_out = write_jsonl(tmp_path / "eval.jsonl", [small_row(i) for i in range(5)])
    keys = dict(
        fine_tuning=tuning, eval_dataset_path=held_out, evaluation_strategy="steps", eval_steps=2, max_steps=4,
        gradient_accumulation_steps=1, doctor="off", save_steps=4,
    )  # fmt: skip
    for name, count in (("without", 0), ("with", 3), ("again", 3)):
        train(tmp_path / name, **keys, eval_generate=count, eval_generate_max_tokens=5)
    for metric in ("loss", "grad_norm", "eval_loss"):
        assert logged(tmp_path / "with", metric) == logged(tmp_path / "without", metric)
    assert weights(tmp_path / "with" / "checkpoint-4") == weights(tmp_path / "without" / "checkpoint-4")
    made = samples(tmp_path / "with")
    assert made == samples(tmp_path / "again")
    assert [row["global_step"] for row in made] == [2, 2, 2, 4, 4, 4]
    assert made[0]["reference"] == small_row(0)["tgt"][0]
    assert small_row(0)["src"][0] in made[0]["prompt"]
    assert logged(tmp_path / "with", "eval_exact_match") == [0.0, 0.0]
    assert not logged(tmp_path / "without", "eval_exact_match")
    assert "step 4 generated: 3 answers, 0 equal the reference" in capsys.readouterr().out
    assert "Generated answers, step 4" in (tmp_path / "with" / "report.html").read_text()


def test_what_it_does_not_run_with_is_refused_by_name(train: Callable, rows: Path, tmp_path: Path) -> None:
    keys = dict(eval_generate=2, eval_dataset_path=rows)
    with pytest.raises(ConfigError, match="tensor_parallel_degree is 2"):
        train(tmp_path / "run", **keys, tensor_parallel_degree=2)
    with pytest.raises(ConfigError, match="stage RM generates no answers"):
        train(tmp_path / "run", **keys, stage="RM")
    with pytest.raises(ConfigError, match="frozen_base is nf4"):
        train(tmp_path / "run", **keys, fine_tuning="LoRA", compute_type="bf16", frozen_base="nf4")


def test_the_prompt_is_what_comes_before_the_last_answer() -> None:
    no, ids = IGNORE, np.arange(10, 18, dtype=np.int32)
    two_turns = Sample(ids, np.array([no, 1, 2, no, no, 3, 4, 5], np.int32))
    assert prompt_of(two_turns).ids == (10, 11, 12, 13, 14, 15)
    assert prompt_of(two_turns).reference == (3, 4, 5)
    pair = PairSample(ids, np.array([no, 1, 2, 3, 4, 5, 6, 7], np.int32), 1, 4, 4)
    assert (prompt_of(pair).ids, prompt_of(pair).reference) == ((10, 11), (1, 2, 3))
    assert GeneratedAnswer("", " yes\n", "yes").exact
    assert GeneratedAnswer("", "abcd", "abce").similarity == pytest.approx(0.75)
