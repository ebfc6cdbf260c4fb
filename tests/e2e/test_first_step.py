"""From pressing return to the first step: what a user waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT = 6.0  # seconds; the best of three, as other tests share the machine


def first_step(tiny_model: Path, rows: Path, output: Path, cache: Path) -> float:
    words = dict(
        model_name_or_path=tiny_model, train_dataset_path=rows, output_dir=output, fine_tuning="LoRA",
        compute_type="fp32", max_seq_len=96, max_steps=2, device="cpu",
    )  # fmt: skip
    command = [sys.executable, "-m", "erniekit", "train", *(f"{k}={v}" for k, v in words.items())]
    start = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "ERNIEKIT_CACHE": str(cache)}, stdout=subprocess.PIPE)
    metrics = output / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() - start < 60
        assert process.poll() in (None, 0)
        time.sleep(0.02)
    took = time.monotonic() - start
    process.communicate(timeout=60)
    assert process.returncode == 0
    return took


@pytest.mark.full
def test_the_first_step_of_a_tiny_model_comes_within_six_seconds(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    times = []
    for k in range(3):
        times.append(first_step(tiny_model, rows, tmp_path / f"run{k}", tmp_path / "cache"))
        if times[-1] < LIMIT:
            break
    assert min(times) < LIMIT, times
    print(f"first step after {min(times):.2f} s")
