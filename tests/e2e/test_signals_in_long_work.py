"""A signal inside an evaluation, in one process: it is left between two batches, whatever the stage and the moment. And
one inside a save: the run leaves with what was just written."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import Preempted
from erniekit.parallel.engine import Engine
from erniekit.train.save import Saver
from erniekit.train.step import TrainStep
from support.recorded import whole_pairs


def records(folder: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(r["global_step"], r["eval_loss"]) for r in records(folder) if "eval_loss" in r]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["global_step"], r["loss"]) for r in records(folder) if "loss" in r]


def asking_in_batch(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """SIGTERM in this evaluation batch of the run; the list grows with each."""
    calls: list[int] = []
    plain = Engine.evaluate

    def evaluate(engine: Engine, batch: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == number:
            signal.raise_signal(signal.SIGTERM)
        return plain(engine, batch)

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    return calls


@pytest.mark.parametrize("schedule", ["steps", "no"], ids=["on schedule", "at the end"])
def test_the_run_stops_between_two_batches_and_its_next_part_makes_up_for_the_evaluation(
    schedule: str, train: Callable, weights: Callable, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = dict(
        eval_dataset_path=rows, evaluation_strategy=schedule, do_eval=True, eval_steps=2, save_steps=2, max_steps=4,
        per_device_eval_batch_size=1, gradient_accumulation_steps=1, doctor="off",
        load_best_model_at_end=schedule == "steps",
    )  # fmt: skip
    train(tmp_path / "whole", **keys)
    step = 2 if schedule == "steps" else 4
    with monkeypatch.context() as patch:
        calls = asking_in_batch(3, patch)
        with pytest.raises(Preempted, match=f"SIGTERM: stopped after step {step}, saved .*checkpoint-{step}"):
            train(tmp_path / "cut", **keys)
    assert calls == [1, 2, 3]
    assert evaluations(tmp_path / "cut") == []
    events = json.loads((tmp_path / "cut" / "run.json").read_text())["events"]
    assert [e["step"] for e in events if e["name"] == "save"][-1] == step, "saved before it was evaluated"
    train(tmp_path / "cut", **keys)
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert weights(tmp_path / "cut" / "checkpoint-4") == weights(tmp_path / "whole" / "checkpoint-4")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole"), "the best one too"


def test_an_evaluation_that_was_whole_is_logged_once_after_a_kill_behind_it(
    train: Callable, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 knows nothing of its evaluation: the resumed run repeats it, in the same place."""
    keys: dict[str, Any] = dict(
        eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=2, save_steps=2, max_steps=4,
        gradient_accumulation_steps=1, doctor="off",
    )  # fmt: skip
    train(tmp_path / "whole", **keys)
    plain = TrainStep.launch

    def dies(step: TrainStep, batches: Any, number: int) -> Any:
        if number == 3:
            raise KeyboardInterrupt
        return plain(step, batches, number)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "launch", dies)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", **keys)
    assert [step for step, _ in evaluations(tmp_path / "cut")] == [2]
    train(tmp_path / "cut", **keys)
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")


def test_a_preference_evaluation_is_left_between_two_batches_too(
    train: Callable, paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = whole_pairs(paddle, tmp_path / "pairs.jsonl")
    calls = asking_in_batch(2, monkeypatch)
    with pytest.raises(Preempted, match="stopped after step 1"):
        train(
            tmp_path / "run", stage="DPO", train_dataset_path=data, eval_dataset_path=data, max_steps=2, eval_steps=1,
            max_seq_len=160, evaluation_strategy="steps", packing=False, per_device_eval_batch_size=1, doctor="off",
        )  # fmt: skip
    assert calls == [1, 2]
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_a_signal_inside_a_save_leaves_once_it_is_written_without_another_step_and_tells_how_to_go_on(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Saver.save

    def save(saver: Saver, state: Any, *more: Any, **options: Any) -> Any:
        if state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return plain(saver, state, *more, **options)

    monkeypatch.setattr(Saver, "save", save)
    with pytest.raises(Preempted, match="stopped after step 2") as stopped:
        train(tmp_path / "run", save_steps=2, max_steps=6, doctor="off")
    assert str(stopped.value).splitlines()[1].startswith("next: erniekit train ")
    assert "stopped after" not in capsys.readouterr().out, "whoever shows the error says it"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_late_stop_is_told_in_the_time_since_the_signal(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Saver.save

    def save(saver: Saver, *more: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return plain(saver, *more, **options)

    monkeypatch.setattr(Saver, "save", save)
    with pytest.raises(Preempted, match=r"; from the signal to the end of the save: [0-9]+ s of preempt_grace_s 0"):
        train(tmp_path / "run", save_steps=1, preempt_grace_s=0, max_steps=3, doctor="off")
