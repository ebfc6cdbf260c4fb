"""What a run leaves that asked for no checkpoints: its model, and nothing that only training on would need."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import CheckpointError, Preempted
from erniekit.train.metrics import LogHook

KEYS = dict(max_steps=2, gradient_accumulation_steps=1, doctor="off", save_strategy="no", lr_scheduler_type="constant")


def states_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.safetensors") if p.name.startswith(("optimizer", "master_weights")))


def test_save_strategy_no_leaves_weights_alone_and_the_same_command_finds_the_run_finished(
    train: Callable, tmp_path: Path
) -> None:
    train(tmp_path / "run", **KEYS)
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    assert states_in(checkpoint) == []
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert train(tmp_path / "run", **KEYS).steps == 2

    with pytest.raises(CheckpointError, match="holds only weights") as refused:
        train(tmp_path / "run", **{**KEYS, "max_steps": 3})
    assert "ignore_load_lr_and_optim=True" in refused.value.fix
    assert train(tmp_path / "run", **{**KEYS, "max_steps": 3, "ignore_load_lr_and_optim": True}).steps == 3


def test_a_finished_run_without_states_names_all_keys_that_extend_it_before_data_is_read(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = {**KEYS, "lr_scheduler_type": "linear"}
    train(tmp_path / "run", **keys)
    train(tmp_path / "run", **keys)
    said = capsys.readouterr().out
    assert "and set extend_run=True ignore_load_lr_and_optim=True (checkpoint-2 holds no optimiser states" in said
    for given, also in (({}, " and extend_run=True"), ({"extend_run": True}, "")):
        with pytest.raises(CheckpointError, match="holds only weights, no optimiser states") as refused:
            train(tmp_path / "run", **{**keys, "max_steps": 3, **given})
        assert refused.value.fix.startswith(f"ignore_load_lr_and_optim=True{also} trains on")
        assert "data     " not in capsys.readouterr().out
    more = {"max_steps": 3, "extend_run": True, "ignore_load_lr_and_optim": True}
    assert train(tmp_path / "run", **{**keys, **more}).steps == 3


def test_epochs_are_counted_before_a_run_without_states_is_refused(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = {**KEYS, "max_steps": -1, "gradient_accumulation_steps": 2}
    train(tmp_path / "run", **keys, num_train_epochs=1)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="holds only weights"):
        train(tmp_path / "run", **keys, num_train_epochs=2)
    assert "weights" not in capsys.readouterr().out.partition("saves    ")[2], "no model was built"


def test_a_finished_runs_command_leaves_its_times_as_they_are(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")

    def numbers() -> list[list[float]]:
        run = json.loads((tmp_path / "run.json").read_text())["metrics"]
        files = [json.loads((tmp_path / f"{name}_results.json").read_text()) for name in ("all", "train")]
        return [[one[name] for name in names] for one in (run, *files)]

    train(tmp_path, **KEYS)
    before = numbers()
    assert "done     2 steps in " in capsys.readouterr().out
    train(tmp_path, **KEYS)
    assert numbers() == before
    assert "done     2 steps, none of them now, train_loss" in capsys.readouterr().out
    train(tmp_path, **{**KEYS, "max_steps": 3, "ignore_load_lr_and_optim": True})
    assert "done     3 steps, the last of them in " in capsys.readouterr().out
    assert numbers() != before


def test_a_key_keeps_what_training_on_takes(train: Callable, tmp_path: Path) -> None:
    train(tmp_path / "run", **KEYS, ignore_save_lr_and_optim=False)
    assert states_in(tmp_path / "run" / "checkpoint-2") == ["optimizer.safetensors"]
    assert train(tmp_path / "run", **{**KEYS, "max_steps": 3}, ignore_save_lr_and_optim=False).steps == 3


def test_a_signal_saves_all_that_going_on_takes(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LogHook.after_step

    def stopping(self: LogHook, trainer: Any, result: Any) -> None:
        plain(self, trainer, result)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LogHook, "after_step", stopping)
        with pytest.raises(Preempted):
            train(tmp_path / "run", **KEYS)
    assert states_in(tmp_path / "run" / "checkpoint-1") == ["optimizer.safetensors"]
    assert train(tmp_path / "run", **KEYS).steps == 2
