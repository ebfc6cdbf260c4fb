"""Runs of several real ranks for test_rank_*.py: start, wait, and what is left on disk and in the journals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.checkpoint import manifest
from erniekit.checkpoint.manager import CheckpointManager, step_of
from erniekit.errors import CheckpointError
from faults.results import Row
from support.recorded import tiny_folder, whole_rows

SERVER = Path(__file__).with_name("rank_server.py")
TIMEOUT = 240.0  # seconds for a run that takes two on an idle machine
Faults = Sequence[dict[str, Any]]

SEED = int(os.environ.get("FAULT_SEED", time.time_ns() % 1_000_000))
STEPS, EVERY = 10, 2  # of a run; between its saves
PHASES = ("data", "forward/backward", "collective", "update")
TP = dict(tensor_parallel_degree=2, gradient_accumulation_steps=2)  # both ranks hold parts of what is saved
PP = dict(pipeline_parallel_degree=2, gradient_accumulation_steps=2)
FSDP = dict(sharding_parallel_degree=2, sharding="stage2")
ASYNC = dict(unified_checkpoint_config="async_save")


@dataclass
class Ended:
    """One start of a run, after all its processes ended."""

    logs: Path
    codes: list[int]
    ended: list[float]  # monotonic seconds, as in the journals
    began: float

    def said(self, rank: int) -> str:
        return (self.logs / f"rank-{rank}.log").read_text(errors="replace")

    def journal(self, rank: int, kind: str) -> list[dict[str, Any]]:
        path = self.logs / f"journal-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def faults(self) -> list[dict[str, Any]]:
        return [event for rank in range(len(self.codes)) for event in self.journal(rank, "fault")]

    def steps(self, rank: int) -> list[int]:
        return [event["step"] for event in self.journal(rank, "step")]

    def story(self) -> str:
        tails = [f"--- rank {rank}: {code}\n{self.said(rank)[-1500:]}" for rank, code in enumerate(self.codes)]
        return "\n".join([*tails, str(self.faults())])


@dataclass
class Started:
    server: RankServer
    number: int
    logs: Path
    pids: list[int]
    began: float
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)

    def wait(self, seconds: float = TIMEOUT) -> Ended:
        until = time.monotonic() + seconds
        while len(self.ends) < len(self.pids):
            if not self.server.listen(until - time.monotonic()):
                for rank, pid in enumerate(self.pids):
                    if rank not in self.ends:
                        os.kill(pid, signal.SIGKILL)  # still ours: the server has not waited for it
                said = [f"rank {r}: {(self.logs / f'rank-{r}.log').read_text()[-2000:]}" for r in range(len(self.pids))]
                raise AssertionError("\n".join([f"not ended within {seconds} s: {self.logs}", *said]))
        ends = [self.ends[rank] for rank in range(len(self.pids))]
        return Ended(self.logs, [code for code, _ in ends], [at for _, at in ends], self.began)


class RankServer:
    """`folder` holds the tiny model, its rows, the cache and every run."""

    def __init__(self, folder: Path, paddle: Path) -> None:
        self.folder = folder
        tiny_folder(paddle, folder / "model")
        whole_rows(paddle, folder / "rows.jsonl")
        self._started: dict[int, Started] = {}
        self._log = (folder / "server.log").open("w")
        (folder / "tmp").mkdir()  # for the crash reports of the ranks whose peer died
        places = {"ERNIEKIT_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **places}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), *self.words("warm", max_steps=1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            bufsize=0,  # select and readline must see the same
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert b"ready" in ready, (folder / "server.log").read_text()

    def words(self, run: str, **keys: Any) -> list[str]:
        values = dict(
            model_name_or_path=self.folder / "model", train_dataset_path=self.folder / "rows.jsonl",
            output_dir=self.folder / run, fine_tuning="Full", compute_type="fp32", max_seq_len=96, learning_rate=1e-3,
            max_steps=STEPS, save_steps=EVERY, save_total_limit=2, gradient_accumulation_steps=1, report_to="none",
            device="cpu", doctor="off",
        )  # fmt: skip
        return [f"{name}={value}" for name, value in {**values, **keys}.items()]

    def start(
        self,
        run: str,
        ranks: int = 2,
        faults: Faults = (),
        launcher: bool = False,
        two_files: bool = False,
        together: bool = False,
        **keys: Any,
    ) -> Started:
        """`launcher`: one process that starts the ranks itself, without faults of ours. `two_files`: a rank's states
        are two files, however small. `together`: all ranks write a model or an adapter, however small."""
        number = len(self._started)
        logs = self.folder / f"{run}.start-{number}"
        logs.mkdir()
        job = dict(job=number, ranks=ranks, words=self.words(run, **keys), faults=list(faults), logs=str(logs))
        assert self._process.stdin is not None
        job |= dict(launcher=launcher, two_files=two_files, together=together)
        self._process.stdin.write((json.dumps(job) + "\n").encode())
        self._process.stdin.flush()
        started = self._started[number] = Started(self, number, logs, [], 0.0)
        while not started.pids:
            assert self.listen(TIMEOUT), (self.folder / "server.log").read_text()
        return started

    def run(self, run: str, ranks: int = 2, faults: Faults = (), **keys: Any) -> Ended:
        return self.start(run, ranks, faults, **keys).wait()

    def listen(self, seconds: float) -> bool:
        """One message of the server, booked; False when none came in time."""
        assert self._process.stdout is not None
        if seconds <= 0 or not select.select([self._process.stdout], [], [], seconds)[0]:
            return False
        line = self._process.stdout.readline()
        assert line, (self.folder / "server.log").read_text()
        told = json.loads(line)
        started = self._started[told["job"]]
        if "pids" in told:
            started.pids, started.began = told["pids"], told["at"]
        else:
            started.ends[told["rank"]] = (told["code"], told["at"])
        return True

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()


# --- what is on disk


def curve(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["global_step"], r["loss"]) for r in map(json.loads, lines) if "loss" in r]


def tensors(folder: Path) -> dict[str, str]:
    """sha256 of every file of weights and optimiser state in a published checkpoint; raises when it is torn."""
    names = [name for name in manifest.check(folder).files if name.endswith(".safetensors")]
    return {name: manifest.measure(folder / name).sha256 for name in names}  # however it was written


@dataclass
class Reference:
    """The run nobody disturbed, with all its checkpoints."""

    folder: Path
    ended: Ended

    def __post_init__(self) -> None:
        self.curve = curve(self.folder)
        self.tensors = {step_of(path): tensors(path) for path in CheckpointManager(self.folder).list()}
        self.calls = self.ended.journal(0, "published")[-1]["calls"]  # changes of the disk until a save is published

    def torn(self, folder: Path) -> list[str]:
        """Published checkpoints that do not verify, or are not bit for bit those of this run."""
        bad = []
        for path in CheckpointManager(folder).list():
            try:
                if tensors(path) != self.tensors[step_of(path)]:
                    bad.append(f"{path.name}: other content")
            except CheckpointError as error:
                bad.append(f"{path.name}: {error.what}")
        return bad

    def differing(self, folder: Path) -> list[str]:
        """Losses of a finished run that are not bit for bit those of this one, and its last weights."""
        last = f"checkpoint-{max(step or 0 for step in self.tensors)}"
        mine = dict(curve(folder))
        out = [f"loss of step {step}" for step, loss in self.curve if mine.get(step) != loss]
        out += ["steps repeated or left out"] if [s for s, _ in curve(folder)] != [s for s, _ in self.curve] else []
        return out + (["last weights"] if tensors(folder / last) != tensors(self.folder / last) else [])


def lost(folder: Path, starts: Sequence[Ended]) -> list[str]:
    """Published in any of these starts, not deleted on purpose, and not there."""
    published = {event["step"] for start in starts for event in start.journal(0, "published")}
    deleted = {event["step"] for start in starts for event in start.journal(0, "deleting")}
    there = {step_of(path) for path in CheckpointManager(folder).list()}
    return [f"checkpoint-{step}" for step in sorted(published - deleted - there)]


def undisturbed(server: RankServer, name: str, **keys: Any) -> Reference:
    ended = server.run(name, save_steps=1, save_total_limit=100, **keys)
    assert ended.codes == [0, 0], ended.story()
    return Reference(server.folder / name, ended)


def judge(row: Row, reference: Reference, folder: Path, starts: list[Ended], finished: bool) -> None:
    """Nothing lost, nothing torn; and once the run has finished, nothing different."""
    story = f"FAULT_SEED={SEED} {folder}\n{starts[-1].story()}"
    gone, torn = lost(folder, starts), reference.torn(folder)
    row.lost, row.torn = (row.lost or 0) + len(gone), (row.torn or 0) + len(torn)
    assert not gone, f"{gone} {story}"
    assert not torn, f"{torn} {story}"
    if finished:
        assert set(starts[-1].codes) == {0}, story
        different = reference.differing(folder)
        row.differing = (row.differing or 0) + len(different)
        assert not different, f"{different} {story}"
