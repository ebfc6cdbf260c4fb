"""One job on two kinds of device as a user types it: same losses as one process, a loss of one side is noticed, and the
other goes on alone. Both kinds compute on the CPU (tests/support)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from erniekit.demo import tiny
from support import toy_device

TOYS = Path(toy_device.__file__).parent
NOTICED_S = 30.0  # for the side that is left
LONG = 10_000  # steps: until it is killed


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(TOYS), os.environ.get("PYTHONPATH", "")])
    devices = "toy=toy_device,second=second_toy"
    return {**os.environ, "PYTHONPATH": paths, "ERNIEKIT_DEVICES": devices, "OMP_NUM_THREADS": "1"}


def command(models: Path, output: Path, **more: Any) -> list[str]:
    keys = dict(
        model_name_or_path=models / "tiny", train_dataset_path=tiny.TRAIN, output_dir=output, fine_tuning="LoRA",
        lora_rank=4, max_seq_len=64, max_steps=4, gradient_accumulation_steps=2, learning_rate=1e-3, save_steps=2,
        cache_dir=models / "cache", doctor="off", logging_steps=1, report_to="none", dataset_num_proc=1, device="toy",
        log_dir=output / "ranks", compute_type="fp32", straggler_factor=0, lr_scheduler_type="constant",
        num_nextn_predict_layers=0,
    )  # fmt: skip
    return [sys.executable, "-m", "erniekit", "train", *(f"{k}={v}" for k, v in {**keys, **more}.items())]


MIXED = dict(islands="toy:1:1,second:1:3", pipeline_parallel_degree=2, nproc_per_node=2, max_restarts=0)


def run(words: list[str]) -> str:
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def curve(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    tiny.make_tiny_model(folder / "tiny", family="ernie4_5_moe", layers=4)
    return folder


def rank_process(launcher: int, rank: int) -> psutil.Process | None:
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            if child.environ().get("RANK") == str(rank):
                return child
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return None


@pytest.mark.full
def test_two_kinds_of_device_train_as_one_and_the_side_that_is_left_goes_on_alone(models: Path, tmp_path: Path) -> None:
    run(command(models, tmp_path / "one", max_steps=6))
    said = run(command(models, tmp_path / "two", max_steps=6, **MIXED))
    assert "islands  toy: rank 0, second: rank 1" in said
    assert "stage 0  1 layers on toy" in said, "the second is three times as fast"
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), abs=2e-6)
    output, logs = tmp_path / "killed", tmp_path / "said"
    with logs.open("w") as out:
        words = command(models, output, max_steps=LONG, **MIXED)
        launcher = subprocess.Popen(words, env=environment(), stdout=out, stderr=out)
    try:
        until = time.monotonic() + 240
        while "step 4 save" not in logs.read_text():
            assert time.monotonic() < until, logs.read_text()[-2000:]
            assert launcher.poll() is None, logs.read_text()[-2000:]
            time.sleep(0.05)
        victim = rank_process(launcher.pid, 1)
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
        assert launcher.wait(NOTICED_S) != 0
    finally:
        if launcher.poll() is None:
            launcher.kill()
    kept = max(int(folder.name.rpartition("-")[2]) for folder in output.glob("checkpoint-*"))
    assert kept >= 4
    told = run(command(models, output, max_steps=kept + 2))
    assert f"checkpoint-{kept} at step {kept} of {kept + 2}" in told
    assert "islands" not in told
    assert len(curve(output)) == kept + 2
    assert curve(output)[:6] == pytest.approx(curve(tmp_path / "one"), abs=2e-6)


def test_islands_of_another_number_of_ranks_are_refused_before_any_starts(models: Path, tmp_path: Path) -> None:
    words = command(models, tmp_path / "out", **{**MIXED, "islands": "toy:2,second:1"})
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "islands names 3 ranks, and 2 are started" in done.stdout + done.stderr
