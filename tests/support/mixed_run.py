"""`erniekit train` on the CPU alone, and on islands of unlike devices of which one is killed. Used by
tests/e2e/test_mixed_run.py (two kinds that compute on the CPU) and tests/device/test_cuda_mixed.py (a card and a CPU).

Jobs are started together and waited for where their results are read: most of each is the start of Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from erniekit.demo import tiny
from support.processes import alive, rank_processes

NOTICED_S = 30.0  # from the loss of a side until the launcher says so
ENDED_S = 90.0  # until the side that is left has ended, too: 4 s by itself, 30 s beside 24 other processes on two cores
ENDS_WITHIN = 600.0  # of a job, beside others on a loaded machine
STEPS = 24  # long enough that a job is killed in the middle
KILLED_AFTER = 4  # steps, with a checkpoint


def make_models(folder: Path) -> Path:
    tiny.make_tiny_model(folder / "tiny", family="ernie4_5_moe", layers=4)
    return folder


@dataclass
class MixedRun:
    output: Path
    models: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def said(self) -> str:
        return self.log.read_text()

    def start(self, **more: Any) -> MixedRun:
        keys = dict(
            model_name_or_path=self.models / "tiny", train_dataset_path=tiny.TRAIN, output_dir=self.output, seed=3,
            fine_tuning="LoRA", lora_rank=4, max_seq_len=64, max_steps=STEPS, gradient_accumulation_steps=2,
            learning_rate=1e-3, save_steps=2, cache_dir=self.models / "cache", doctor="off", logging_steps=1,
            report_to="none", dataset_num_proc=1, device="cpu", log_dir=self.output.with_suffix(".ranks"),
            compute_type="fp32", compile=False, cuda_graph=False, straggler_factor=0, lr_scheduler_type="constant",
            num_nextn_predict_layers=0,
        )  # fmt: skip
        if "islands" in more:
            keys |= dict(pipeline_parallel_degree=2, nproc_per_node=2, max_restarts=0)
        words = [f"{key}={value}" for key, value in {**keys, **more}.items()]
        command = [sys.executable, "-m", "erniekit", "train", *words]
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1", **self.env}
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        return self

    def wait(self) -> str:
        """What a job said that ended well."""
        assert self.process is not None
        assert self.process.wait(ENDS_WITHIN) == 0, self.said()[-3000:]
        return self.said()

    def wait_for_checkpoint(self, step: int) -> None:
        assert self.process is not None
        until = time.monotonic() + ENDS_WITHIN
        while f"step {step} save" not in self.said():
            assert time.monotonic() < until, self.said()[-3000:]
            assert self.process.poll() is None, self.said()[-3000:]
            time.sleep(0.02)

    def kill_rank(self, rank: int) -> tuple[float, float]:
        """Seconds until the launcher says which rank is lost, and until nothing of the job runs any more."""
        assert self.process is not None
        ranks = rank_processes(self.process.pid)
        assert ranks.keys() == {"0", "1"}
        ranks[str(rank)].send_signal(signal.SIGKILL)
        struck = time.monotonic()
        while f"rank {rank} was ended by SIGKILL" not in self.said():
            assert time.monotonic() - struck < NOTICED_S, self.said()[-3000:]
            time.sleep(0.02)
        noticed = time.monotonic() - struck
        assert self.process.wait(ENDED_S) != 0, self.said()[-3000:]
        assert not any(alive(process.pid) for process in ranks.values())
        return noticed, time.monotonic() - struck

    def checkpoint(self) -> int:
        """The step of the last one."""
        return max(int(folder.name.rpartition("-")[2]) for folder in self.output.glob("checkpoint-*"))

    def losses(self) -> list[float]:
        lines = map(json.loads, (self.output / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def end(self) -> None:
        """Of a job that a failed test left."""
        if self.process is not None and self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(True):
                child.kill()
            self.process.kill()
            self.process.wait()


class Survived(NamedTuple):
    noticed_s: float
    ended_s: float  # of the side that was left, after the loss
    step: int  # that one process went on from
    resumed_s: float  # which took so long


def kill_and_resume(job: MixedRun, rank: int, device: str) -> Survived:
    """The job, started on islands, loses a rank and goes on as one process on `device`."""
    job.wait_for_checkpoint(KILLED_AFTER)
    noticed, ended = job.kill_rank(rank)
    kept = job.checkpoint()
    assert KILLED_AFTER <= kept < STEPS, "killed in the middle"
    before, began = len(job.said()), time.monotonic()
    told = job.start(device=device).wait()[before:]
    assert f"checkpoint-{kept} at step {kept} of {STEPS}" in told
    assert "islands" not in told
    return Survived(noticed, ended, kept, time.monotonic() - began)
