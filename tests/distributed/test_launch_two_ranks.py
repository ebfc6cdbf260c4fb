"""`erniekit train RECIPE nproc_per_node=2` as typed: the losses of one process, a signal and a hang in one of two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from erniekit.checkpoint import manifest
from erniekit.cli.train import train_command
from erniekit.launch import agent
from erniekit.train.watchdog import EXIT_CODE

sys.path.insert(0, str(Path(__file__).parent))

from launchers import Launcher, forked

from support.processes import alive
from support.recorded import tiny_folder, whole_rows

pytestmark = pytest.mark.xdist_group("two_ranks")  # they share the run that nobody disturbs

STEPS, EVERY = 24, 8  # of a run; between its saves
WHEN = re.compile(
    r'"global_step": 9\b'
)  # of metrics.jsonl: a checkpoint is there, and the next save is some steps away
LAST = f"checkpoint-{STEPS}"


@dataclass(frozen=True)
class Runs:
    folder: Path

    def start(self, name: str, **keys: object) -> Launcher:
        words = dict(output_dir=name, log_dir=f"{name}-logs", nproc_per_node=2, gradient_accumulation_steps=1)
        args = ["recipe.yaml", *(f"{key}={value}" for key, value in {**words, **keys}.items())]

        def command() -> int:
            os.chdir(self.folder)
            os.environ |= {"ERNIEKIT_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
            return train_command(args)

        return forked(self.folder / f"{name}-screen-{len(list(self.folder.glob(f'{name}-screen-*')))}", command)

    def alone(self, name: str, **keys: object) -> None:
        """In one process, and a fresh one: it computes itself, and a fork of a process that has computed may hang."""
        words = dict(output_dir=name, log_dir=f"{name}-logs", nproc_per_node=1, **keys)
        command = [sys.executable, "-m", "erniekit", "train", "recipe.yaml", *(f"{k}={v}" for k, v in words.items())]
        env = os.environ | {"ERNIEKIT_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    def losses(self, name: str) -> list[tuple[int, float]]:
        records = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return [(r["global_step"], r["loss"]) for r in records if "loss" in r]

    def bits(self, name: str, checkpoint: str = LAST) -> dict[str, bytes]:
        """Of the weights and all the optimiser knows."""
        folder = self.folder / name / checkpoint
        names = [file for file in manifest.check(folder).files if file.endswith(".safetensors")]
        assert len(names) > 1, "weights and optimiser"
        return {file: (folder / file).read_bytes() for file in names}

    def final(self, name: str) -> bytes:
        return (self.folder / name / "model.safetensors").read_bytes()

    def ranks(self, launcher: Launcher, name: str) -> list[int]:
        """Process ids in the order of ranks, once step `WHEN` is done and long before the end."""
        until, metrics = time.monotonic() + 240, self.folder / name / "metrics.jsonl"
        while not (metrics.exists() and WHEN.search(metrics.read_text())):
            assert time.monotonic() < until, launcher.said()
            time.sleep(0.002)
        found = {int(child.environ()["RANK"]): child.pid for child in psutil.Process(launcher.pid).children()}
        return [found[rank] for rank in sorted(found)]


@pytest.fixture(scope="module")
def runs(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A tiny recorded model, its rows and a recipe."""
    folder = tmp_path_factory.mktemp("two_ranks")
    tiny_folder(paddle, folder / "model")
    whole_rows(paddle, folder / "rows.jsonl")
    keys = dict(
        model_name_or_path="model", train_dataset_path="rows.jsonl", fine_tuning="Full", compute_type="fp32",
        max_seq_len=96, learning_rate=1e-3, max_steps=STEPS, save_steps=EVERY, save_total_limit=100, report_to="none",
        device="cpu", doctor="off", max_restarts=1,
    )  # fmt: skip
    (folder / "recipe.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return Runs(folder)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """The run of two that nobody disturbs."""
    launcher = runs.start("whole")
    assert launcher.wait(240) == 0, launcher.said()
    return "whole"


def test_two_processes_give_the_losses_of_one(runs: Runs, whole: str) -> None:
    runs.alone("alone", gradient_accumulation_steps=2, max_restarts=0)
    one, two = runs.losses("alone"), runs.losses(whole)
    assert [step for step, _ in two] == list(range(1, STEPS + 1))
    # fp32; the two halves of a batch are added in another order, and AdamW carries that on
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-5)
    assert two[-1][1] < two[0][1] * 0.9, "it has learnt, so the losses say something"
    assert [(runs.folder / "whole-logs" / f"workerlog.{rank}").is_file() for rank in (0, 1)] == [True, True]
    assert not (runs.folder / "alone-logs").exists(), "one process needs no launcher"


@pytest.mark.full
def test_a_signal_to_one_rank_saves_on_both_and_the_same_command_goes_on(runs: Runs, whole: str) -> None:
    launcher = runs.start("told")
    os.kill(runs.ranks(launcher, "told")[1], signal.SIGTERM)
    assert launcher.wait() == 75, launcher.said()
    stopped = runs.losses("told")[-1][0]
    assert stopped < STEPS, "it must be stopped in the middle"
    assert runs.bits("told", f"checkpoint-{stopped}")
    said = launcher.said()
    assert f"SIGTERM: stopped after step {stopped}, saved told/checkpoint-{stopped}" in said[-2], said
    assert said[-1].startswith("next: erniekit train "), said
    assert not any(line.startswith(("error", "restart")) for line in said)

    again = runs.start("told")
    assert again.wait(240) == 0, again.said()
    assert runs.losses("told") == runs.losses(whole), "no step is missing, done twice or different"
    assert runs.bits("told") == runs.bits(whole)
    assert runs.final("told") == runs.final(whole)


@pytest.mark.full
def test_a_rank_that_hangs_is_ended_and_the_restarted_run_ends_with_the_same_bits(
    runs: Runs, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LEAVE_S", 2.0)
    launcher = runs.start("hung", hang_soft_s=1.5, hang_hard_s=4)
    ranks = runs.ranks(launcher, "hung")
    os.kill(ranks[1], signal.SIGSTOP)  # rank 0 waits for it in a collective that never ends
    hung_at = time.monotonic()
    assert (runs.folder / "hung" / LAST).exists() is False, "it must hang in the middle"
    while psutil.Process(ranks[1]).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() - hung_at < 20, "the fault must really happen"
    while any(map(alive, ranks)):
        assert time.monotonic() - hung_at < 60, launcher.said()  # ten times as long where it had come to a save
        time.sleep(0.02)
    assert time.monotonic() - hung_at > 3.0, "not before the hard limit"
    assert launcher.wait(240) == 0, launcher.said()
    said = "\n".join(launcher.said())
    assert f"ended with exit code {EXIT_CODE}" in said or "was ended by SIGKILL" in said
    assert "restart 1 of 1 in 1 s" in said
    assert list((runs.folder / "hung" / "hangs").glob("rank-0-step-*.txt")), "stacks of the one that waited"
    assert runs.losses("hung") == runs.losses(whole), "no step is missing, done twice or different"
    assert runs.bits("hung") == runs.bits(whole)
    assert runs.final("hung") == runs.final(whole)
