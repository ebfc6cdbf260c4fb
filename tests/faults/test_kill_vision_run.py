"""kill -9 in the middle of a run with pictures: it goes on with the same pixels, losses and bits, and nothing of it is
left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.jsonl import write_jsonl
from support.seen import MEDIA, rows, tiny_seeing

STEPS, SAVED, KILLED = 6, 2, 4
# Killed while a step is launched: batches of later ones are being decoded.
VICTIM = f"""
import os, signal, sys
from erniekit.cli.main import main
from erniekit.train.step import TrainStep
launch = TrainStep.launch
def until(self, batches, step):
    if step == {KILLED}:
        os.kill(os.getpid(), signal.SIGKILL)
    return launch(self, batches, step)
TrainStep.launch = until
main(sys.argv[1:])
"""


def run(words: list[str], output: Path, killed: bool = False) -> subprocess.CompletedProcess[str]:
    """Returns once everybody who holds its output is gone: processes that decode as well."""
    program = ["-c", VICTIM] if killed else ["-m", "erniekit"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *program, "train", *words, f"output_dir={output}"],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip


def losses(output: Path) -> dict[int, float]:
    told = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {record["global_step"]: record["loss"] for record in told if "learning_rate" in record}


def weights(output: Path) -> dict[str, bytes]:
    saved = output / f"checkpoint-{STEPS}"
    return {p.name: p.read_bytes() for p in saved.glob("*.safetensors")}


@pytest.mark.full
@pytest.mark.parametrize("keys", [("fine_tuning=LoRA", "vision_feature_cache=on"), ("fine_tuning=Full",)])
def test_a_run_with_pictures_that_is_killed_goes_on_to_the_same_bits(keys: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(MEDIA, tmp_path / "media")
    seen = ("one_image", "two_images", "two_turns", "thinking", "video_lossless", "alpha", "grey")
    data = write_jsonl(tmp_path / "rows.jsonl", [rows()[name] for name in seen])
    words = [
        "stage=VL-SFT", f"model_name_or_path={tiny_seeing(tmp_path / 'model')}", f"train_dataset_path={data}",
        "compute_type=fp32", "device=cpu", "report_to=none", "doctor=off", "max_seq_len=256", "max_pixels=9408",
        "variable_resolution=True", "video_min_frames=4", "video_max_frames=4", f"max_steps={STEPS}",
        f"save_steps={SAVED}", "logging_steps=1", "dataset_num_proc=1", "media_num_proc=2", *keys,
    ]  # fmt: skip
    whole = run([*words, f"cache_dir={tmp_path / 'cache'}"], tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    elsewhere = f"cache_dir={tmp_path / 'other cache'}"
    victim = run([*words, elsewhere], tmp_path / "killed", killed=True)
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    assert not (tmp_path / "killed" / f"checkpoint-{STEPS}").exists()
    again = run([*words, elsewhere], tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert len(weights(tmp_path / "whole")) > 1
