"""What a run leaves that asked for no checkpoints: its model, and nothing that only training on would need."""

from __future__ import annotations

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
    assert "ignore_load_lr_and_optim: True" in refused.value.fix
    assert train(tmp_path / "run", **{**KEYS, "max_steps": 3, "ignore_load_lr_and_optim": True}).steps == 3


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
