"""Layouts of `erniekit train` over real NCCL, their ranks on one card (`ranks_per_device`): one rank's losses, resumed,
resharded, a rank killed and a rank stopped.

Ranks take turns on the card and talk over sockets: this proves communicators, orders, shapes and watchdogs, not speed.
All layouts are started together, as many ranks at a time as the machine has cores; `nvidia-cuda-mps-control -d` before
it makes it several times as fast. Not for the faults (`-k killed`): a client of MPS that is killed may take the others
with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from erniekit.demo import tiny
from support.processes import alive, rank_processes
from support.stored import stored_digests

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/data"
DEVICE = "gpu"
STEPS, BATCH = 6, 8
SAVED = 8  # the checkpoint before a rank is struck
FAULTS_AT_ONCE = 4  # jobs: without MPS their ranks take turns on the card
ENDS_WITHIN = 240.0  # seconds of one job, beside others
EXACT, ROUNDED = 1e-5, 2e-2  # losses in fp32, and in bf16
TP, PP, CP = "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"


def sharded(level: int, **more: Any) -> dict[str, Any]:
    return dict(sharding=f"stage{level}", sharding_parallel_degree=2, **more)


# family, ranks, keys; every one is compared with the same on one rank, without the keys of the layout.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    # Packed bytes are gathered next to 16-bit weights.
    "bf16 LoRA over wint4/8, stage3": (
        "ernie4_5_moe", 2, sharded(3, compute_type="bf16", fine_tuning="LoRA", frozen_base="wint4/8"),
    ),
    "bf16 LoRA over fp8, stage3": (
        "ernie4_5_moe", 2, sharded(3, compute_type="bf16", fine_tuning="LoRA", frozen_base="fp8"),
    ),
    "dp2": ("ernie4_5", 2, {}),
    "dp4": ("ernie4_5", 4, {}),
    "stage1": ("ernie4_5", 2, sharded(1)),
    "stage2": ("ernie4_5", 2, sharded(2)),
    "stage3": ("ernie4_5", 2, sharded(3)),
    "stage3 x dp2": ("ernie4_5", 4, sharded(3)),
    "tp2": ("ernie4_5", 2, {TP: 2}),
    "tp2, sequence parallel": ("ernie4_5", 2, {TP: 2, "sequence_parallel": True}),
    "tp4": ("ernie4_5", 4, {TP: 4}),
    "pp2": ("ernie4_5", 2, {PP: 2}),
    "pp2, zero bubble": ("ernie4_5", 2, {PP: 2, "pp_schedule": "zero_bubble"}),
    "pp2, torch's runner": ("ernie4_5", 2, {PP: 2, "pp_runner": "torch"}),
    "cp2": ("ernie4_5", 2, {CP: 2}),
    "tp2 x pp2": ("ernie4_5", 4, {TP: 2, PP: 2}),
    "tp2 x cp2": ("ernie4_5", 4, {TP: 2, CP: 2}),
    "stage3 x tp2": ("ernie4_5", 4, sharded(3, **{TP: 2})),
    "stage2 x pp2": ("ernie4_5", 4, sharded(2, **{PP: 2})),
    "experts dp2": ("ernie4_5_moe", 2, {}),
    "experts ep2": ("ernie4_5_moe", 2, {"moe_group": "ep"}),
    "experts ep2, all-gather": (
        "ernie4_5_moe", 2, {"moe_group": "ep", "moe_multimodal_dispatch_use_allgather": "v2"},
    ),
    "experts stage3 x ep2": ("ernie4_5_moe", 2, sharded(3, moe_group="ep")),
    "experts tp2 mp": ("ernie4_5_moe", 2, {TP: 2, "moe_group": "mp"}),
    "experts ep2 x pp2": ("ernie4_5_moe", 4, {PP: 2, "moe_group": "ep"}),
    "llama stage3": ("llama", 2, sharded(3)),
    "llama cp2": ("llama", 2, {CP: 2}),
    "LoRA tp2": ("ernie4_5", 2, {TP: 2, "fine_tuning": "LoRA"}),
    "LoRA experts ep2": ("ernie4_5_moe", 2, {"moe_group": "ep", "fine_tuning": "LoRA"}),
    "LoRA over wint4/8, stage3": ("ernie4_5_moe", 2, sharded(3, fine_tuning="LoRA", frozen_base="wint4/8")),
    "DPO tp2": ("ernie4_5", 2, {TP: 2, "stage": "DPO", "train_dataset_path": EXAMPLES / "dpo-train.jsonl"}),
    "DPO experts ep2": (
        "ernie4_5_moe", 2, {"moe_group": "ep", "stage": "DPO", "train_dataset_path": EXAMPLES / "dpo-train.jsonl"},
    ),
    "PT stage3": ("llama", 2, sharded(3, stage="PT", train_dataset_path=EXAMPLES / "pretrain.jsonl")),
    "PT pp2": ("llama", 2, {PP: 2, "stage": "PT", "train_dataset_path": EXAMPLES / "pretrain.jsonl"}),
    "bf16 dp2": ("ernie4_5", 2, {"compute_type": "bf16"}),
    "bf16 stage3": ("ernie4_5", 2, sharded(3, compute_type="bf16")),
    "bf16 experts ep2": ("ernie4_5_moe", 2, {"moe_group": "ep", "compute_type": "bf16"}),
}  # fmt: skip
OF_LAYOUT = (TP, PP, CP, "sequence_parallel", "sharding", "sharding_parallel_degree", "pp_schedule", "pp_runner",
             "moe_group", "moe_multimodal_dispatch_use_allgather")  # fmt: skip
# A checkpoint of the first, resumed by the second: one rank's curve goes on.
RESHARDS = (
    ("dp2", "tp2"), ("tp2", "pp2"), ("pp2", "stage3"), ("stage3", "cp2"), ("experts ep2", "experts ep2 x pp2"),
)  # fmt: skip


@dataclass
class Job:
    """One `erniekit train`."""

    folder: Path
    models: Path
    family: str
    ranks: int
    keys: dict[str, Any]
    process: subprocess.Popen[bytes] | None = field(default=None)
    began: float = 0.0

    def start(self) -> Job:
        width = 1
        for name in (TP, PP, CP):
            width *= self.keys.get(name, 1)
        keys = dict(
            model_name_or_path=self.models / self.family, train_dataset_path=tiny.TRAIN, output_dir=self.folder / "out",
            device=DEVICE, fine_tuning="Full", compute_type="fp32", max_seq_len=256, packing=True, max_steps=STEPS,
            learning_rate=1e-3, lr_scheduler_type="constant", gradient_accumulation_steps=BATCH * width // self.ranks,
            batch_size=1, logging_steps=1, save_strategy="steps", save_steps=4, evaluation_strategy="no", doctor="off",
            report_to="none", cache_dir=self.models / "cache", log_dir=self.folder / "ranks", dataset_num_proc=1,
            compile=False, cuda_graph=False, straggler_factor=0, max_restarts=0, num_nextn_predict_layers=0,
            num_train_epochs=100,
        )  # fmt: skip
        if self.ranks > 1:
            keys |= dict(nproc_per_node=self.ranks, ranks_per_device=self.ranks)
        words = [f"{key}={value}" for key, value in {**keys, **self.keys}.items()]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "log").open("ab")
        command = [sys.executable, "-m", "erniekit", "train", *words]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        return self

    def ended(self) -> bool:
        assert self.process is not None
        if self.process.poll() is None and time.monotonic() - self.began > ENDS_WITHIN:
            self.end()
        return self.process.poll() is not None

    def end(self) -> None:
        assert self.process is not None
        for one in psutil.Process(self.process.pid).children(recursive=True):
            one.kill()
        self.process.kill()
        self.process.wait()

    def steps(self) -> int:
        """Logged so far."""
        metrics = self.folder / "out" / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.is_file() else 0

    def losses(self) -> list[float]:
        while self.process is None or not self.ended():  # another thread starts it (`together`)
            time.sleep(0.1)
        assert self.process.returncode == 0, (self.folder / "log").read_text()[-3000:]
        lines = map(json.loads, (self.folder / "out" / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]


def alone_name(name: str) -> str:
    family, _, keys = LAYOUTS[name]
    return json.dumps([family, {k: str(v) for k, v in keys.items() if k not in OF_LAYOUT}])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("ernie4_5", "ernie4_5_moe", "llama"):
        tiny.make_tiny_model(folder / family, family=family, layers=4)
    return folder


@pytest.fixture(scope="module")
def jobs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Every layout, and what each is compared with."""
    folder = tmp_path_factory.mktemp("nccl")
    made: dict[str, Job] = {}
    for name, (family, ranks, keys) in LAYOUTS.items():
        if alone_name(name) not in made:
            own = {k: v for k, v in keys.items() if k not in OF_LAYOUT}
            made[alone_name(name)] = Job(folder / f"one{len(made)}", models, family, 1, own)
        made[name] = Job(folder / f"job{len(made)}", models, family, ranks, keys)
    with together(list(made.values())):
        yield made


@contextmanager
def together(jobs: list[Job]) -> Iterator[None]:
    """Runs them to their ends in the order given, as many ranks at a time as there are cores: tests wait for their own
    only, so that each is reported as soon as it is known."""
    waiting, running, stop = list(jobs), list[Job](), threading.Event()
    room = max(4, os.cpu_count() or 4)

    def run() -> None:
        while (waiting or running) and not stop.is_set():
            running[:] = [job for job in running if not job.ended()]
            if waiting and sum(job.ranks for job in running) + waiting[0].ranks <= room:
                running.append(waiting.pop(0).start())
            else:
                time.sleep(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for job in running:
            if not job.ended():
                job.end()


def within(name: str) -> float:
    return ROUNDED if LAYOUTS[name][2].get("compute_type") == "bf16" else EXACT


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_over_nccl_has_the_losses_of_one_rank(jobs: dict[str, Job], name: str) -> None:
    want = jobs[alone_name(name)].losses()
    assert len(want) == STEPS
    assert abs(want[0] - want[-1]) > 10 * within(name), "it must really have trained"
    assert jobs[name].losses() == pytest.approx(want, abs=within(name))


@pytest.fixture(scope="module")
def resumed(jobs: dict[str, Job], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """The first layout's checkpoint under the second: to the end, and saved again at once."""
    folder, made = tmp_path_factory.mktemp("resumed"), dict[str, Job]()
    for first, second in RESHARDS:
        jobs[first].losses()
        family, ranks, keys = LAYOUTS[second]
        point = {"resume_from_checkpoint": jobs[first].folder / "out" / "checkpoint-4", "override_resume": True}
        for name, more in (("on", {}), ("saved", {"max_steps": 4})):
            made[f"{first} {second} {name}"] = Job(
                folder / f"job{len(made)}", models, family, ranks, {**keys, **point, **more}
            )
    with together(list(made.values())):
        yield made


@pytest.mark.parametrize(("first", "second"), RESHARDS, ids=lambda name: name)
def test_a_checkpoint_of_one_layout_goes_on_in_another(
    jobs: dict[str, Job], resumed: dict[str, Job], first: str, second: str
) -> None:
    want = jobs[alone_name(second)].losses()[4:]
    assert resumed[f"{first} {second} on"].losses() == pytest.approx(want, abs=EXACT)


@pytest.mark.parametrize(("first", "second"), RESHARDS, ids=lambda name: name)
def test_weights_and_optimiser_come_through_another_layout_bit_for_bit(
    jobs: dict[str, Job], resumed: dict[str, Job], first: str, second: str
) -> None:
    job = resumed[f"{first} {second} saved"]
    assert job.losses() == []
    before, after = (stored_digests(each.folder / "out" / "checkpoint-4") for each in (jobs[first], job))
    assert any(name.startswith("optimizer ") for name in before)
    assert after == before


@dataclass
class Strike:
    """A rank was sent a signal, and what came of it; made by threads, so that the faults run beside each other."""

    job: Job
    fault: signal.Signals

    def run(self) -> Strike:
        job = self.job.start()
        assert job.process is not None
        try:
            while not (job.steps() > SAVED + 1 and (job.folder / "out" / f"checkpoint-{SAVED}").is_dir()):
                assert not job.ended(), (job.folder / "log").read_text()[-3000:]
                time.sleep(0.02)
            victim = rank_processes(job.process.pid)["1"]
            victim.send_signal(self.fault)
            struck = time.monotonic()
            while alive(victim.pid):
                assert time.monotonic() - struck < 60, "noticed within a minute"
                time.sleep(0.05)
            assert job.process.poll() is None, "the launcher stays"
            while not job.ended():
                time.sleep(0.1)
        finally:
            if job.process.poll() is None:
                job.end()
        return self


FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
STRUCK = ("dp2", "tp2", "pp2", "stage3", "experts ep2")


@pytest.fixture(scope="module")
def strikes(
    models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[tuple[str, str], Future[Strike]]]:
    """All that were selected, begun together."""
    folder = tmp_path_factory.mktemp("struck")
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    # Few saves, and struck between two of them: ranks that wait for each other in a save have ten times as long.
    more = dict(max_steps=4 * SAVED, save_steps=SAVED, max_restarts=1, hang_soft_s=8, hang_hard_s=20)
    with ThreadPoolExecutor(FAULTS_AT_ONCE) as pool:
        made = {}
        for name in STRUCK:
            family, ranks, keys = LAYOUTS[name]
            for fault, sent in FAULTS.items():
                if {"name": name, "fault": fault} not in selected:
                    continue
                job = Job(folder / f"job{len(made)}", models, family, ranks, {**keys, **more})
                made[name, fault] = pool.submit(Strike(job, sent).run)
        yield made


@pytest.fixture(scope="module")
def uninterrupted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    made = {family: Job(folder / family, models, family, 1, {}) for family in {LAYOUTS[name][0] for name in STRUCK}}
    with together(list(made.values())):
        yield made


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", STRUCK)
def test_a_rank_that_is_killed_or_stops_inside_a_collective_is_noticed_and_the_run_goes_on(
    strikes: dict[tuple[str, str], Future[Strike]], uninterrupted: dict[str, Job], name: str, fault: str
) -> None:
    strike = strikes[name, fault].result()
    assert strike.job.process is not None
    output = (strike.job.folder / "log").read_text()
    assert strike.job.process.returncode == 0, output[-3000:]
    assert "restart 1 of 1" in output
    assert strike.job.losses()[:STEPS] == pytest.approx(uninterrupted[LAYOUTS[name][0]].losses(), abs=EXACT)
