"""Stop anywhere and go on: weights, optimiser and curve bit for bit those of a run nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file

from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError, ErnieKitError, Preempted
from erniekit.train.metrics import LogHook
from faults.results import fault

STEPS = 6
NEVER = -1


def curve(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["global_step"], r["loss"]) for r in map(json.loads, lines) if "loss" in r]


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A real SIGTERM to this process while step k is being booked."""
    plain = LogHook.after_step

    def arrange(step: int) -> None:
        def after_step(self, trainer, result):
            plain(self, trainer, result)
            if result.step == step:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(LogHook, "after_step", after_step)

    return arrange


@pytest.mark.parametrize(
    ("tuning", "stops"),
    [
        ("Full", (4,)),
        pytest.param("Full", (1, 4), marks=pytest.mark.full),
        ("LoRA", (2,)),
        pytest.param("Full", (2, 3, 5), marks=pytest.mark.full),
        pytest.param("LoRA", (1, 3, 4, 5), marks=pytest.mark.full),
    ],
)
def test_a_run_stopped_after_any_step_ends_bit_identical(
    tuning: str, stops: tuple[int, ...], train: Callable, stop_at: Callable, weights: Callable, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    train(whole, fine_tuning=tuning, doctor="off")
    want = weights(whole / f"checkpoint-{STEPS}")
    assert any(name.startswith("optimizer") for name in want)
    with fault("R1", f"SIGTERM after every step, {tuning}, packing, accumulation 3, 2 loader threads") as row:
        row.differing = 0
        for step in stops:
            stop_at(step)
            row.count += 1
            with pytest.raises(Preempted):
                train(tmp_path / f"stop{step}", fine_tuning=tuning, doctor="off")
            stop_at(NEVER)
            saved = [p.name for p in (tmp_path / f"stop{step}").glob("checkpoint-*")]
            assert saved == [f"checkpoint-{step}"], "the checkpoint of that very step"
            row.hits += 1
            train(tmp_path / f"stop{step}", fine_tuning=tuning, doctor="off")
            assert weights(tmp_path / f"stop{step}" / f"checkpoint-{STEPS}") == want
            assert curve(tmp_path / f"stop{step}") == curve(whole), "no step repeated, none left out"


def test_the_checks_before_training_do_not_change_the_run(train: Callable, weights: Callable, tmp_path: Path) -> None:
    train(tmp_path / "on", doctor="on")
    train(tmp_path / "off", doctor="off")
    assert weights(tmp_path / "on") == weights(tmp_path / "off")


@pytest.mark.parametrize("lean", [False, True])
def test_bf16_with_masters_resumes_bit_identical(
    lean: bool, train: Callable, stop_at: Callable, weights: Callable, tmp_path: Path
) -> None:
    """lean: the moments in 16 bit as well."""
    keys = dict(compute_type="bf16", max_steps=2, gradient_accumulation_steps=1, doctor="off")
    keys |= {"use_lowprecision_moment": lean}
    train(tmp_path / "whole", **keys)
    stop_at(1)
    with pytest.raises(Preempted):
        train(tmp_path / "cut", **keys)
    stop_at(NEVER)
    train(tmp_path / "cut", **keys)
    got, want = weights(tmp_path / "cut" / "checkpoint-2"), weights(tmp_path / "whole" / "checkpoint-2")
    assert "master_weights.safetensors" in want
    assert got == want
    kept = load_file(tmp_path / "cut" / "checkpoint-2" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16 if lean else torch.float32}


@pytest.mark.full  # the demo, at every commit, kills and resumes, too
def test_a_process_killed_with_kill_9_goes_on_where_its_last_checkpoint_was(
    tiny_model: Path, rows: Path, weights: Callable, tmp_path: Path
) -> None:
    def start(output: Path) -> subprocess.Popen:
        words = dict(
            model_name_or_path=tiny_model, train_dataset_path=rows, output_dir=output, fine_tuning="Full",
            compute_type="fp32", max_seq_len=96, max_steps=40, save_steps=2, learning_rate=1e-3, report_to="none",
            device="cpu", doctor="off",
        )  # fmt: skip
        env = {**os.environ, "ERNIEKIT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "erniekit", "train", *(f"{k}={v}" for k, v in words.items())]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    victim = start(tmp_path / "killed")
    deadline = time.monotonic() + 240
    while not (tmp_path / "killed" / "checkpoint-4").exists():
        assert victim.poll() is None, victim.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "it must die of the kill, not finish first"
    assert not (tmp_path / "killed" / "checkpoint-40").exists()
    for name in ("killed", "whole"):
        process = start(tmp_path / name)
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error.decode()
    assert weights(tmp_path / "killed" / "checkpoint-40") == weights(tmp_path / "whole" / "checkpoint-40")
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 5e-4),
        *(pytest.param(*p, marks=pytest.mark.full) for p in (("seed", 7), ("gradient_accumulation_steps", 2))),
    ],
)
def test_resuming_with_another_setting_is_refused_by_name(
    key: str, value: object, train: Callable, tmp_path: Path
) -> None:
    train(tmp_path, max_steps=2, save_steps=1, doctor="off")
    rmtree(tmp_path / "checkpoint-2")  # as if it had been stopped after the first step
    with fault("R3", "resumed with another learning rate, seed, batch or an edited data file") as row:
        row.count, row.note = 1, "refused, the key named"
        with pytest.raises(ConfigError) as caught:
            train(tmp_path, max_steps=2, save_steps=1, doctor="off", **{key: value})
        assert key in caught.value.where
        assert "the same command with output_dir=OTHER" in caught.value.fix
        row.hits = 1
        train(tmp_path, max_steps=2, save_steps=1, doctor="off", override_resume=True, **{key: value})


def test_what_no_checkpoint_fits_is_not_offered_to_be_overridden(
    train: Callable, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture
) -> None:
    one, other = (make_tiny_model(tmp_path_factory.mktemp("model"), seed) for seed in (0, 5))
    keys = dict(model_name_or_path=one, fine_tuning="LoRA", doctor="off", gradient_accumulation_steps=1)
    train(tmp_path, max_steps=1, **keys)
    more = {**keys, "max_steps": 2, "extend_run": True}
    for change in (dict(fine_tuning="Full"), dict(model_name_or_path=other), dict(lora_rank=4)):
        with pytest.raises(ConfigError) as caught:
            train(tmp_path, **{**more, **change})
        assert "override_resume" not in caught.value.fix
        assert "only another output_dir helps" in caught.value.fix
        capsys.readouterr()
        with pytest.raises(ErnieKitError) as refused:
            train(tmp_path, **{**more, **change}, override_resume=True)
        said = capsys.readouterr().out
        if "model_name_or_path" in change:  # that may answer alike, which only the probe shows
            assert "does not answer as it did" in refused.value.what
            assert refused.value.where == str(tmp_path / "checkpoint-1")
        else:
            assert "which override_resume cannot change" in refused.value.what
            assert next(iter(change)) in refused.value.where
            assert "\ndata " not in said, "before data is prepared"
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, **{**more, "compute_type": "bf16"})
    assert "override_resume: True and ignore_load_lr_and_optim: True" in caught.value.fix


def test_resuming_with_an_edited_data_file_is_refused(train: Callable, rows: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(rows.read_text())
    train(tmp_path / "run", train_dataset_path=mine, max_steps=1, doctor="off")
    mine.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    with fault("R3", "resumed with another learning rate, seed, batch or an edited data file") as row:
        row.count, row.note = 1, "refused, the key named"
        with pytest.raises(ConfigError) as caught:
            train(tmp_path / "run", train_dataset_path=mine, max_steps=1, doctor="off")
        assert "train data" in caught.value.where
        row.hits = 1


def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_used(
    train: Callable, weights: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "run", save_steps=2, doctor="off")
    want = weights(tmp_path / "run" / "checkpoint-6")
    victim = tmp_path / "run" / "checkpoint-6" / "optimizer.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    train(tmp_path / "run", save_steps=2, doctor="off")
    said = capsys.readouterr()
    assert "optimizer.safetensors" in said.err
    assert "checkpoint-4 at step 4" in said.out
    assert (tmp_path / "run" / "checkpoint-6.corrupt-1").is_dir()
    assert weights(tmp_path / "run" / "checkpoint-6") == want
