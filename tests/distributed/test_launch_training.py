"""The real trainer as a rank: killed and started again by our launcher, and started by torchrun from the script."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from erniekit.cli.train import train_command

sys.path.insert(0, str(Path(__file__).parent))

from launchers import Launcher, forked

from support.recorded import tiny_folder, whole_rows

ENDED = "checkpoint-10"  # a checkpoint that is there long before the end


@pytest.fixture
def words(paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A tiny recorded model and its rows."""
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    model, rows = tiny_folder(paddle, tmp_path / "model"), whole_rows(paddle, tmp_path / "rows.jsonl")
    return dict(
        model_name_or_path=model, train_dataset_path=rows, output_dir=tmp_path / "out",
        max_seq_len=96, learning_rate=1e-3, report_to="none", device="cpu", doctor="off", max_restarts=1,
    )  # fmt: skip


def steps(folder: Path) -> list[int]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["global_step"] for r in records if "loss" in r]


@pytest.mark.full
def test_a_killed_trainer_is_started_again_and_resumes_by_itself(words: dict[str, object], tmp_path: Path) -> None:
    words |= dict(max_steps=40, save_steps=10, fine_tuning="Full", compute_type="fp32")
    args = [f"{name}={value}" for name, value in words.items()]
    process = forked(tmp_path / "launcher", lambda: train_command(args))
    until = time.monotonic() + 240
    while not (tmp_path / "out" / ENDED).is_dir():
        assert time.monotonic() < until, process.said()
        time.sleep(0.01)
    (rank,) = psutil.Process(process.pid).children()
    os.kill(rank.pid, signal.SIGKILL)
    assert process.wait() == 0, process.said()
    said = "\n".join(process.said())
    assert "error: rank 0 was ended by SIGKILL" in said
    assert "restart 1 of 1 in 1 s" in said
    assert steps(tmp_path / "out") == list(range(1, 41)), "no step is missing or done twice in the record"
    assert "resum" in (tmp_path / "erniekit_dist_log" / "workerlog.0").read_text().lower()
    assert (
        f"global_step: {steps(tmp_path / 'out')[0]},"
        in (tmp_path / "erniekit_dist_log" / "workerlog.0.attempt-1").read_text()
    )


@pytest.mark.full
def test_a_killed_trainer_that_started_anew_goes_on_from_its_own_checkpoints(
    words: dict[str, object], tmp_path: Path
) -> None:
    words |= dict(max_steps=40, save_steps=10, fine_tuning="Full", compute_type="fp32")

    def start(name: str, **keys: object) -> Launcher:
        args = [f"{name}={value}" for name, value in (words | keys).items()]
        return forked(tmp_path / name, lambda: train_command(args))

    assert (first := start("first", max_steps=20)).wait() == 0, first.said()
    process = start("anew", overwrite_output_dir=True, seed=7)
    until = time.monotonic() + 240
    while not ((tmp_path / "out" / "checkpoint-10.aside-1").is_dir() and (tmp_path / "out" / ENDED).is_dir()):
        assert time.monotonic() < until, process.said()
        time.sleep(0.01)
    (rank,) = psutil.Process(process.pid).children()
    os.kill(rank.pid, signal.SIGKILL)
    assert process.wait() == 0, process.said()
    assert "restart 1 of 1 in 1 s" in "\n".join(process.said())
    log = (tmp_path / "erniekit_dist_log" / "workerlog.0").read_text()
    assert "overwrite_output_dir took effect when it began; it resumes from checkpoint-" in log
    assert sorted(path.name for path in (tmp_path / "out").glob("*.aside-*")) == [
        "checkpoint-10.aside-1",
        "checkpoint-20.aside-1",
    ], "the old run's are kept, and nothing of the new one was set aside"


@pytest.mark.full
def test_the_script_runs_under_torchrun_and_launches_nothing_itself(
    words: dict[str, object], tmp_path: Path, root: Path
) -> None:
    from torch.distributed.run import main as torchrun

    flags = [word for name, value in (words | dict(max_steps=2)).items() for word in (f"--{name}", str(value))]
    script = str(root / "examples/post-training/sft/train.py")
    args = [
        "--nproc_per_node",
        "1",
        "--standalone",
        script,
        *flags,
        "--eval_dataset_path",
        str(tmp_path / "rows.jsonl"),
    ]
    process = forked(tmp_path / "launcher", lambda: torchrun(args) or 0)
    assert process.wait() == 0, process.said()
    assert steps(tmp_path / "out") == [1, 2]
    assert not (tmp_path / "erniekit_dist_log").exists()
