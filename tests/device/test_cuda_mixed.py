"""An NVIDIA card and a CPU in one job: two processes, hidden states through pinned memory and gloo.

The card is the first stage and the CPU the second, then the other way round; both against one CPU process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.demo import tiny

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

STEPS = 6
# fp32 on both, TF32 off: products add up in another order. Losses are about 6; measured on CPUs they differ by 1e-6.
LOSS = 2e-4


def train(models: Path, output: Path, **more: Any) -> tuple[list[float], str]:
    keys = dict(
        model_name_or_path=models / "tiny", train_dataset_path=tiny.TRAIN, output_dir=output, fine_tuning="LoRA",
        lora_rank=4, max_seq_len=128, max_steps=STEPS, gradient_accumulation_steps=4, learning_rate=1e-3,
        cache_dir=models / "cache", doctor="off", logging_steps=1, report_to="none", dataset_num_proc=1, device="cpu",
        log_dir=output / "ranks", compute_type="fp32", compile=False, cuda_graph=False, straggler_factor=0,
        lr_scheduler_type="constant", num_nextn_predict_layers=0, save_steps=STEPS,
    )  # fmt: skip
    words = [sys.executable, "-m", "erniekit", "train", *(f"{k}={v}" for k, v in {**keys, **more}.items())]
    env = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line], said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    tiny.make_tiny_model(folder / "tiny", family="ernie4_5_moe", layers=4)
    return folder


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(models, tmp_path_factory.mktemp("one") / "run")[0]


@pytest.mark.parametrize("islands", ["gpu:1:3,cpu:1:1", "cpu:1:1,gpu:1:3"])
def test_a_card_and_a_cpu_in_one_job_train_as_one_process_does(
    islands: str, models: Path, alone: list[float], tmp_path: Path
) -> None:
    got, said = train(
        models, tmp_path / "run", islands=islands, pipeline_parallel_degree=2, nproc_per_node=2, max_restarts=0
    )  # fmt: skip
    first, second = (part.split(":")[0] for part in islands.split(","))
    assert f"islands  {first}: rank 0, {second}: rank 1" in said
    assert len(got) == STEPS
    assert got == pytest.approx(alone, abs=LOSS)
    assert abs(alone[0] - alone[-1]) > 10 * LOSS, "it must really have trained"


def test_all_weights_with_a_tied_embedding_on_both_sides_train_too(models: Path, tmp_path: Path) -> None:
    """Its gradient is summed through the host; the two copies are compared bit for bit before each save."""
    one, _ = train(models, tmp_path / "one", fine_tuning="Full")
    two, _ = train(
        models, tmp_path / "two", fine_tuning="Full", islands="gpu:1:3,cpu:1:1", pipeline_parallel_degree=2,
        nproc_per_node=2, max_restarts=0, drift_check_steps=0,
    )  # fmt: skip
    assert two == pytest.approx(one, abs=LOSS)
