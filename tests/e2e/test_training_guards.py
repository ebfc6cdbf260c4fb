"""What a run does when something goes wrong, or right: bad numbers, best models, early stops, rotation, signals."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint import writer
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.errors import CheckpointError, ErnieKitError
from erniekit.recipes import stage
from erniekit.train.guard import NotFinite
from faults.results import fault


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], list[int]]:
    """Turns the loss of the micro-batches with these running numbers into NaN; returns the list of hits."""

    def arrange(numbers: set[int]) -> list[int]:
        plain, hits, count = stage.causal_loss, [], [0]

        def loss(model, batch, *chunk):
            count[0] += 1
            value = plain(model, batch, *chunk)
            if count[0] in numbers and torch.is_grad_enabled():
                hits.append(count[0])
                return value * float("nan")
            return value

        monkeypatch.setattr(stage, "causal_loss", loss)
        return hits

    return arrange


def test_one_bad_step_is_skipped_and_counted_and_the_run_goes_on(
    train: Callable, poison: Callable, tmp_path: Path
) -> None:
    hits = poison({4})  # the first micro-batch of step 2
    with fault("N1", "NaN in the loss, one process: one step; five in a row") as row:
        result = train(tmp_path, doctor="off")
        row.count, row.hits = 1, len(hits)
        assert hits == [4], "the fault must really happen"
        assert result.metrics["skipped_steps"] == 1
        assert [r["global_step"] for r in records(tmp_path)] == [1, 3, 4, 5, 6]
        model = ModelFolder(tmp_path).build()
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_five_bad_steps_in_a_row_go_back_to_the_last_checkpoint_once(
    train: Callable, poison: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hits = poison(set(range(7, 22)))  # steps 3 to 7 of accumulation 3
    with fault("N1", "NaN in the loss, one process: one step; five in a row") as row:
        result = train(tmp_path, max_steps=10, save_steps=2, doctor="off")
        row.count, row.hits = 15, len(hits)
        assert len(hits) == 15
        assert "going back to checkpoint-2" in capsys.readouterr().err
        assert result.steps == 10
        state = json.loads((tmp_path / "checkpoint-10" / "state.json").read_text())
        assert state["rollbacks"] == 1
        assert state["updates"] == 10, "two steps before the fault and eight after going back"
        assert state["packs"] == (2 + 5 + 8) * 3, "the bad stretch of data is skipped, not repeated"


def test_a_run_that_stays_bad_stops_and_names_the_packs(train: Callable, poison: Callable, tmp_path: Path) -> None:
    poison(set(range(7, 100)))
    with pytest.raises(NotFinite) as caught:
        train(tmp_path, max_steps=20, save_steps=2, doctor="off")
    assert "packs" in caught.value.where
    assert caught.value.exit_code == 3


def test_bad_from_the_first_step_with_no_checkpoint_says_so(train: Callable, poison: Callable, tmp_path: Path) -> None:
    poison(set(range(1, 100)))
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        train(tmp_path, max_steps=20, doctor="off")


def test_the_best_model_is_kept_by_rotation_and_is_the_result(train: Callable, rows: Path, tmp_path: Path) -> None:
    """The highest loss is called best here, so that the best evaluation is surely the first."""
    keys = dict(
        eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_steps=1,
        save_total_limit=2, greater_is_better=True, doctor="off",
    )  # fmt: skip
    train(tmp_path, **keys)
    losses = {r["global_step"]: r["eval_loss"] for r in records(tmp_path) if "eval_loss" in r}
    best = max(losses, key=losses.__getitem__)
    assert best < 5, "rotation would have deleted it"
    folders = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert folders == sorted({f"checkpoint-{best}", "checkpoint-5", "checkpoint-6"})
    saved, result = ModelFolder(tmp_path / f"checkpoint-{best}").build(), ModelFolder(tmp_path).build()
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), result.parameters()))


def test_a_run_stops_early_when_evaluation_does_not_improve(train: Callable, rows: Path, tmp_path: Path) -> None:
    result = train(
        tmp_path, eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=1, early_stopping_patience=2,
        learning_rate=0.5, max_steps=30, doctor="off",
    )  # fmt: skip
    assert result.steps < 30


def test_an_unknown_metric_for_the_best_model_ends_the_command_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["model_name_or_path=nowhere", "train_dataset_path=no.jsonl", f"output_dir={tmp_path / 'out'}"]
    words += ["eval_dataset_path=no.jsonl", "evaluation_strategy=steps", "eval_steps=1", "early_stopping_patience=1"]
    assert main(["train", *words, "metric_for_best_model=eval_los"]) == 2
    said = capsys.readouterr().err
    assert "an evaluation of SFT reports loss, ppl" in said
    assert "did you mean loss?" in said
    assert not (tmp_path / "out").exists()


def test_rotation_keeps_two_even_when_one_is_asked_for(train: Callable, tmp_path: Path) -> None:
    train(tmp_path, save_steps=1, save_total_limit=1, doctor="off")
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_async_saves_leave_the_same_files_as_plain_ones(train: Callable, weights: Callable, tmp_path: Path) -> None:
    train(tmp_path / "plain", save_steps=2, doctor="off")
    train(tmp_path / "async", save_steps=2, unified_checkpoint_config="async_save", doctor="off")
    for step in (4, 6):
        name = f"checkpoint-{step}"
        assert weights(tmp_path / "async" / name) == weights(tmp_path / "plain" / name)


@pytest.mark.parametrize("how", ["", "async_save"], ids=["in front", "in the background"])
def test_a_save_that_fails_and_one_in_the_background_have_other_words(
    how: str, train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullOnce(writer.FileOps):
        full = True

        def write(self, fd: int, data: memoryview) -> int:
            if self.full:
                self.full = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data)

    monkeypatch.setattr(writer, "ops", FullOnce())
    train(tmp_path, save_steps=2, max_steps=5, unified_checkpoint_config=how, doctor="off")
    events = json.loads((tmp_path / "run.json").read_text())["events"]
    texts = [(e["step"], e["text"]) for e in events if e["name"] == "save"]
    (failed,) = [e for e in events if e["name"] == "not saved"]
    assert failed["step"] == 2
    assert "No space left on device" in failed["text"]
    others = ["in the background"] if how else []
    assert [text for step, text in texts if step == 2] == others
    assert [text for step, text in texts if step == 4] == (others or [str(tmp_path / "checkpoint-4")])


def test_two_trainers_cannot_share_a_folder(train: Callable, tmp_path: Path) -> None:
    from erniekit.checkpoint.lock import RunLock

    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    try:
        with pytest.raises(ErnieKitError, match="another"):
            train(tmp_path / "run", doctor="off")
    finally:
        lock.release()


@pytest.mark.parametrize(
    "granularity", ["full", *(pytest.param(g, marks=pytest.mark.full) for g in ("full_attn", "core_attn"))]
)
def test_recompute_changes_memory_not_numbers(
    granularity: str, train: Callable, weights: Callable, tmp_path: Path
) -> None:
    train(tmp_path / "plain", max_steps=2, doctor="off")
    train(tmp_path / "again", max_steps=2, recompute=True, recompute_granularity=granularity, doctor="off")
    assert weights(tmp_path / "plain") == weights(tmp_path / "again")


def test_paddle_save_format_resumes_and_reloads(train: Callable, tmp_path: Path) -> None:
    train(tmp_path / "hf", max_steps=2, doctor="off")
    train(tmp_path / "paddle", max_steps=2, save_format="paddle", doctor="off")
    a, b = ModelFolder(tmp_path / "hf"), ModelFolder(tmp_path / "paddle")
    assert (a.layout, b.layout) == ("hf", "paddle")
    assert all(torch.equal(p, q) for p, q in zip(a.build().parameters(), b.build().parameters()))
    again = train(tmp_path / "paddle", max_steps=2, save_format="paddle", doctor="off")
    assert again.steps == 2


def test_a_model_can_start_from_nothing_but_its_config(train: Callable, tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    result = train(tmp_path / "run", model_name_or_path=bare, continue_training=False, max_steps=2)
    assert result.metrics["train_loss"] < 8, "near ln(512) = 6.2, not the recorded model's 8.6"
