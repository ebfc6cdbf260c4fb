"""KTO as a user starts it: judged rows in, both kinds of reference, resuming, evaluation, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import erniekit
from erniekit.config.metrics import metrics_of
from erniekit.errors import ConfigError, DataError
from support.jsonl import write_jsonl


@pytest.fixture
def judge(train: Callable, tmp_path: Path) -> Callable:
    """judge(output_dir, key=value, ...) -> RunResult: a small KTO run in fp32, without the checks before it."""
    rows = [{"prompt": f"Question {i}?", "completion": f"Answer {i % 5}.", "label": i % 3 != 0} for i in range(12)]
    file = write_jsonl(tmp_path / "judged.jsonl", rows)

    def go(output: Path, **keys: object) -> Any:
        small = dict(max_seq_len=96, max_steps=4, gradient_accumulation_steps=2, learning_rate=1e-3, doctor="off")
        return train(output, **{"stage": "KTO", "train_dataset_path": file, **small, **keys})

    return go


def logged(folder: Path, name: str = "loss") -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r[name] for r in map(json.loads, lines) if name in r]


@pytest.mark.parametrize("tuning", [pytest.param("Full", marks=pytest.mark.full), "LoRA"])
def test_the_first_loss_is_a_half_and_kept_references_give_the_live_curve(tuning, judge, tmp_path):
    for reference in ("live", "cached"):
        judge(tmp_path / reference, fine_tuning=tuning, reference_logps=reference)
    live, kept = (logged(tmp_path / reference) for reference in ("live", "cached"))
    assert live[0] == pytest.approx(0.5, abs=1e-6)
    assert live[-1] < 0.499, "it learns"
    assert kept == pytest.approx(live, abs=1e-6)  # sums over other rows of a batch


def test_a_kto_run_resumes_bit_for_bit_and_is_evaluated(judge, weights, tmp_path):
    keys = dict(fine_tuning="LoRA", save_steps=2, eval_dataset_path=tmp_path / "judged.jsonl")
    judge(tmp_path / "run", **keys)
    want, curve = weights(tmp_path / "run" / "checkpoint-4"), logged(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    judge(tmp_path / "run", **keys)
    assert weights(tmp_path / "run" / "checkpoint-4") == want
    assert logged(tmp_path / "run") == curve
    at_end = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert at_end["eval_answers"] == 12
    told = {name.removeprefix("eval_") for name in at_end if name.startswith("eval_")}
    of_the_run = {"answers", "runtime", "samples_per_second", "steps_per_second", "model"}
    assert told - of_the_run == set(metrics_of("KTO", "")), "every metric that is told can be chosen"
    alone = erniekit.run(
        "eval", lora_path=tmp_path / "run", stage="KTO", eval_dataset_path=tmp_path / "judged.jsonl", max_seq_len=96,
        compute_type="fp32", output_dir=tmp_path / "alone", device="cpu",
    )  # fmt: skip
    assert alone.metrics["eval_loss"] == pytest.approx(at_end["eval_loss"], abs=1e-6)


def test_rows_without_a_verdict_stop_the_run(judge, tmp_path):
    file = write_jsonl(tmp_path / "plain.jsonl", [{"src": ["Hi?"], "tgt": ["Ho."]}])
    with pytest.raises(DataError, match="`label` is missing"):
        judge(tmp_path / "run", train_dataset_path=file)


def test_keys_of_dpo_that_kto_does_not_read_are_named(judge, tmp_path, capsys):
    judge(tmp_path / "run", max_steps=1, loss_type="ipo")
    assert "loss_type: ipo (without effect: stage is KTO)" in capsys.readouterr().out.replace("'", "")


def test_a_teacher_is_refused_in_kto(judge, tmp_path):
    with pytest.raises(ConfigError, match="a teacher is of stage SFT"):
        judge(tmp_path / "run", teacher_model_name_or_path="somewhere")
