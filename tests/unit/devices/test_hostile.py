"""A device that says cuda and lacks most of what it claims: a run on it finishes and says what it fell back to. Real
processes; the vendor's operators really raise (tests/support/hostile)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.demo import tiny

VENDOR = Path(__file__).resolve().parents[2] / "support" / "hostile"
HOSTILE = {
    "ERNIEKIT_DEVICES": "hostile=hostile_device",
    "PYTHONPATH": f"{VENDOR}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "OMP_NUM_THREADS": "1",
}


def environment() -> dict[str, str]:
    """Without the interpreter in which other tests run Triton kernels on a CPU."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def typed(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "erniekit", *words]
    return subprocess.run(command, env={**environment(), **HOSTILE, **env}, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "tiny"
    tiny.make_tiny_model(folder, family="llama")
    return folder


def train(model: Path, output: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    keys = dict(
        model_name_or_path=model, train_dataset_path=tiny.TRAIN, output_dir=output, fine_tuning="Full",
        max_seq_len=128, max_steps=2, cache_dir=output.parent / "cache", device="hostile", report_to="none",
        dataset_num_proc=1,
    )  # fmt: skip
    return typed("train", *(f"{key}={value}" for key, value in keys.items()), *more, **env)


def test_a_run_on_a_hostile_device_finishes_and_says_what_it_fell_back_to(model: Path, tmp_path: Path) -> None:
    done = train(model, tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "Hostile 9000: no products in bf16 here (RuntimeError: hostileBlas: bf16 is not implemented): computed in fp32",
        "no Triton kernels here (RuntimeError: hostilecc: internal compiler error: unsupported target)",
        "no grouped product of experts here (NotImplementedError: hostileBlas: no grouped product)",
        "no recorded graphs here (its result is wrong)",
        "Hostile 9000 has no bf16",
    ):
        assert line in done.stdout, (line, done.stdout)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_bf16_that_was_asked_for_is_refused_before_the_first_step(model: Path, tmp_path: Path) -> None:
    done = train(model, tmp_path / "run", "compute_type=bf16")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Hostile 9000 has no bf16 (RuntimeError: hostileBlas" in done.stderr
    assert "compute_type: fp32" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_the_demo_holds_every_proof_on_a_hostile_device(tmp_path: Path) -> None:
    done = typed("demo", "--dir", str(tmp_path / "demo"), "--device", "hostile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every proof holds" in done.stdout
    assert "no Triton kernels here" in done.stdout


@pytest.mark.full
def test_the_doctor_prints_what_was_tried_on_it(tmp_path: Path) -> None:
    done = typed("doctor", "device=hostile")
    assert "Hostile 9000" in done.stdout, done.stdout + done.stderr
    assert "hostileBlas: bf16 is not implemented" in done.stdout
    assert "named by ERNIEKIT_DEVICES" in done.stdout
