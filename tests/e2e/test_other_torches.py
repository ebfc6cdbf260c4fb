"""Vendors' builds of torch are older than ours: with each of them a layout trains as one rank does, or is refused
before the first step. Nothing in between: not a hang, not other numbers.

ERNIEKIT_TORCHES lists interpreters with another torch, with os.pathsep between (docs/adding-a-device.md says how to
make one); the interpreter that runs the tests is always among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.demo import tiny

pytestmark = pytest.mark.full

PYTHONS = [sys.executable, *filter(None, os.environ.get("ERNIEKIT_TORCHES", "").split(os.pathsep))]
LAYOUTS = {
    "dp2": (),
    "tp2": ("tensor_parallel_degree=2",),
    "tp2, sequence parallel": ("tensor_parallel_degree=2", "sequence_parallel=True"),
    "cp2": ("context_parallel_degree=2",),
    "pp2": ("pipeline_parallel_degree=2",),
    "stage1": ("sharding=stage1", "sharding_parallel_degree=2"),
    "stage3": ("sharding=stage3", "sharding_parallel_degree=2"),
}
TESTED = (2, 11)  # from here on every layout must run
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def version(python: str) -> tuple[int, ...]:
    code = "import torch; print(torch.__version__.split('+')[0])"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=ENV).stdout
    return tuple(int(number) for number in said.strip().split(".")[:2])


def typed(python: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "erniekit", *map(str, words)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600)


def train(python: str, folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    keys = dict(
        model_name_or_path=folder / "tiny", train_dataset_path=tiny.TRAIN, output_dir=folder / name, device="cpu",
        fine_tuning="Full", max_seq_len=128, max_steps=3, packing=True, global_batch_size=4, learning_rate=1e-3,
        cache_dir=folder / "cache", logging_steps=1, report_to="none", dataset_num_proc=1, max_restarts=0,
        log_dir=folder / f"{name} ranks", straggler_factor=0,
    )  # fmt: skip
    return typed(python, "train", *(f"{key}={value}" for key, value in keys.items()), *more)


def numbers(output: Path) -> list[tuple[float, float]]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [(r["loss"], r["grad_norm"]) for r in records if "loss" in r]


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda python: Path(python).parents[1].name)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An interpreter, and a folder with its run on one rank."""
    folder = tmp_path_factory.mktemp("torches")
    tiny.make_tiny_model(folder / "tiny", family="llama")
    done = train(request.param, folder, "alone")
    assert done.returncode == 0, done.stdout + done.stderr
    return request.param, folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_rank_does_or_is_refused(alone: tuple[str, Path], layout: str) -> None:
    python, folder = alone
    done = train(python, folder, layout, "nproc_per_node=2", *LAYOUTS[layout])
    if done.returncode == 0:
        expected = [number for pair in numbers(folder / "alone") for number in pair]
        assert [number for pair in numbers(folder / layout) for number in pair] == pytest.approx(expected, rel=1e-4)
        return
    said = done.stdout + done.stderr
    assert version(python) < TESTED, said
    assert done.returncode == 2, said
    assert "does not work with torch" in said
    assert not (folder / layout / "metrics.jsonl").exists(), "refused before the first step"


def test_the_demo_holds_every_proof(alone: tuple[str, Path]) -> None:
    python, folder = alone
    done = typed(python, "demo", "--dir", folder / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every proof holds" in done.stdout
