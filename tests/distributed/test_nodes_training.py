"""Real training on several hosts that share nothing but a wire: each has its own folders, and one of them is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from erniekit.checkpoint import manifest
from erniekit.checkpoint.slices import TensorFiles
from erniekit.cli.train import train_command
from erniekit.launch import heartbeat
from erniekit.recipes.run import export_command

sys.path.insert(0, str(Path(__file__).parent))

from launchers import Launcher, forked
from test_nodes import Host, ip

from support.processes import alive
from support.recorded import tiny_folder, whole_rows

pytestmark = pytest.mark.xdist_group("nodes")  # in turn: each has four processes or more

STEPS, EVERY = 24, 3  # of a run; between its saves
WHEN = "checkpoint-6"  # it is there when a host is lost
PATIENCE_S = 180.0  # for what takes 20 on an idle machine
LAST = f"checkpoint-{STEPS}"
LORA_TP = dict(fine_tuning="LoRA", tensor_parallel_degree=2, sequence_parallel=True)  # no rank has the whole adapter


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Hosts 10.78.0.1 and on, plugged into a switch."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    word = uuid.uuid4().hex[:6]
    switch, made = f"ek{word}-s", [Host(f"ek{word}-{k}", f"10.78.0.{k + 1}") for k in range(count)]
    try:
        try:
            for name in (switch, *(host.name for host in made)):
                ip("netns", "add", name)
            ip("-n", switch, "link", "add", "switch", "type", "bridge")
            ip("-n", switch, "link", "set", "switch", "up")
            for k, host in enumerate(made):
                port = ("name", f"port{k}", "netns", switch)
                ip("link", "add", "wire", "netns", host.name, "type", "veth", "peer", *port)
                ip("-n", switch, "link", "set", f"port{k}", "master", "switch", "up")
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "wire")
                ip("-n", host.name, "link", "set", "wire", "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield made
    finally:
        for name in (switch, *(host.name for host in made)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@dataclass
class Machine:
    """A host (None: this very machine) and its disk: model, rows, cache, logs and output are its own."""

    disk: Path
    host: Host | None = None
    launchers: list[Launcher] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.disk / "out"

    @property
    def address(self) -> str:
        assert self.host
        return self.host.address

    def set_up(self, paddle: Path) -> Machine:
        tiny_folder(paddle, self.disk / "model")
        whole_rows(paddle, self.disk / "rows.jsonl")
        return self

    def train(self, words: dict[str, object]) -> Launcher:
        """The command is the same on every machine: its paths are relative, so each finds its own files."""
        common = dict(
            model_name_or_path="model", train_dataset_path="rows.jsonl", output_dir="out", compute_type="fp32",
            max_seq_len=96, learning_rate=1e-3, max_steps=STEPS, save_steps=EVERY, save_total_limit=100,
            gradient_accumulation_steps=2, report_to="none", device="cpu", doctor="off", join_timeout_s=60,
        )  # fmt: skip
        args = [f"{name}={value}" for name, value in {**common, **words}.items()]

        def command() -> int:
            os.chdir(self.disk)
            os.environ |= {"ERNIEKIT_CACHE": str(self.disk / "cache"), "OMP_NUM_THREADS": "1"}
            return train_command(args)

        said = self.disk / f"start-{len(self.launchers)}"
        self.launchers.append(self.host.run(said, command) if self.host else forked(said, command))
        return self.launchers[-1]


@contextmanager
def cluster(folder: Path, paddle: Path, count: int = 2) -> Iterator[list[Machine]]:
    with network(count) as hosts:
        machines = [Machine(folder / f"host{k}", host).set_up(paddle) for k, host in enumerate(hosts)]
        try:
            yield machines
        finally:
            for launcher in (one for machine in machines for one in machine.launchers):
                kill(launcher)  # of a test that failed: a namespace lives as long as its processes


def undisturbed(folder: Path, paddle: Path, ranks: int, **words: object) -> Machine:
    """The same run on one machine, which nobody stops."""
    machine = Machine(folder / "whole").set_up(paddle)
    ended = machine.train({**words, "nproc_per_node": ranks})
    assert ended.wait(PATIENCE_S) == 0, ended.said()
    return machine


def lose(launcher: Launcher, out: Path, cable_of: Host | None = None) -> None:
    """kill -9 of all that runs on a machine, or its cable is pulled, once the checkpoint `WHEN` is in `out`."""
    until = time.monotonic() + PATIENCE_S
    while not (out / WHEN).is_dir():
        assert time.monotonic() < until, launcher.said()
        time.sleep(0.005)
    if cable_of is not None:
        cable_of.plug("down")
        try:
            assert launcher.wait(PATIENCE_S) == 1, "it is cut off from where all meet"
        finally:
            cable_of.plug("up")
        return
    assert kill(launcher) > 1, "a launcher and its rank"
    assert launcher.wait() == -signal.SIGKILL


def kill(launcher: Launcher) -> int:
    """Returns how many processes were still there."""
    if not alive(launcher.pid):
        return 0
    victims = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    for victim in victims:
        with suppress(psutil.NoSuchProcess):  # a rank ends with its launcher
            victim.send_signal(signal.SIGKILL)
    return len(victims)


def curve(out: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(r["global_step"], r["loss"]) for r in records if "loss" in r]


def saved(out: Path) -> list[str]:
    return sorted((p.name for p in out.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))


def same_tensors(one: Path, other: Path) -> bool:
    """Weights, moments and probe, bit for bit; both folders as their manifests say. Who wrote them may differ: ranks
    that see one disk each have a file there, else rank 0 has one for all."""
    found = [tensors_in(folder) for folder in (one, other)]
    assert {name.split(":")[0] for name in found[0]} >= {"optimizer", "probe"}
    return found[0] == found[1]


def tensors_in(folder: Path) -> dict[str, bytes]:
    stems = {
        re.sub(r"-rank-.*|\.safetensors", "", n) for n in manifest.check(folder).files if n.endswith(".safetensors")
    }
    files = {stem: TensorFiles.of_stem(folder, stem) for stem in stems}
    read = {(stem, name): held.read(name) for stem, held in files.items() for name in held.files}
    return {f"{stem}:{name}": t.reshape(-1).view(torch.uint8).numpy().tobytes() for (stem, name), t in read.items()}


def same_model(one: Path, other: Path) -> bool:
    """What a run leaves in its output folder to chat with or to export."""
    files = [{path.name: path.read_bytes() for path in out.glob("*.safetensors")} for out in (one, other)]
    configs = [sorted(path.name for path in out.glob("*config.json")) for out in (one, other)]
    return files[0] == files[1] and bool(files[0]) and configs[0] == configs[1] and bool(configs[0])


def stories(launchers: Sequence[Launcher]) -> str:
    return "\n".join(f"--- {m.err}\n" + "\n".join(m.said()) for m in launchers)


@pytest.mark.parametrize(
    ("numbered", "fault"),
    [
        pytest.param(True, "killed", marks=pytest.mark.full),  # forty seconds and more
        pytest.param(False, "killed", marks=pytest.mark.full),  # it has to miss its heartbeats first
        pytest.param(True, "unplugged", marks=pytest.mark.full),
    ],
)
def test_a_lost_host_comes_back_and_the_run_ends_as_if_nothing_had_happened(
    paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbered: bool, fault: str
) -> None:
    monkeypatch.setattr(heartbeat, "LOST_S", 5.0)
    whole = undisturbed(tmp_path, paddle, 2, **LORA_TP)
    with cluster(tmp_path, paddle) as (first, second):
        words = {**LORA_TP, "nnodes": 2, "master": f"{first.address}:8080"}
        here, there = ({**words, "node_rank": k} if numbered else words for k in range(2))
        one, two = first.train(here), second.train(there)
        lose(two, first.out, cable_of=second.host if fault == "unplugged" else None)
        assert LAST not in saved(first.out), "it must be lost in the middle"
        assert not saved(second.out), "its disk has nothing: rank 0 alone saves"
        again = second.train(there)
        assert [again.wait(PATIENCE_S), one.wait(PATIENCE_S)] == [0, 0], stories([one, again])

    said = "\n".join(one.said())
    assert re.search(r"^error: lost(, and back)?: machine 1 of 2, .* \(10\.78\.0\.2\), rank 1$", said, re.M), said
    assert curve(first.out) == curve(whole.out), "no step is missing, done twice or different"
    assert same_tensors(first.out / LAST, whole.out / LAST)
    (point,) = saved(second.out)  # what the run went on from was brought to it, and nothing else
    assert 6 <= int(point.split("-")[1]) < STEPS
    assert same_tensors(second.out / point, first.out / point)
    assert f"restart 1 of 3 as soon as all machines are there, from {point}" in said
    assert f"resume   out/{point} at step" in (first.disk / "erniekit_dist_log" / "workerlog.0").read_text()

    monkeypatch.chdir(first.disk)
    assert export_command(["model_name_or_path=model", "output_dir=out", "lora=True"]) == 0
    assert manifest.check(first.out / "export").info["proof"]


@pytest.mark.full
def test_the_first_host_may_lose_its_disk_when_every_node_saves(paddle: Path, tmp_path: Path) -> None:
    """It is also where the hosts meet: the other one stops, as documented, and the command is given again on both."""
    keys = dict(fine_tuning="Full", sharding_parallel_degree=2, sharding="stage3", gradient_accumulation_steps=1)
    whole = undisturbed(tmp_path, paddle, 2, **keys)
    with cluster(tmp_path, paddle) as (first, second):
        words = {**keys, "nnodes": 2, "master": f"{first.address}:8080", "save_on_each_node": True}
        numbered = [{**words, "node_rank": k} for k in range(2)]
        one, two = first.train(numbered[0]), second.train(numbered[1])
        lose(one, second.out)
        assert LAST not in saved(second.out), "it must be lost in the middle"
        shutil.rmtree(first.out)
        assert two.wait(PATIENCE_S) == 1, stories([two])
        point = saved(second.out)[-1]
        again = [first.train(numbered[0]), second.train(numbered[1])]
        assert [m.wait(PATIENCE_S) for m in again] == [0, 0], stories(again)

    log = (first.disk / "erniekit_dist_log" / "workerlog.0").read_text()
    assert f"{point} comes from the node of rank 1" in log
    assert curve(first.out) == curve(whole.out)[int(point.split("-")[1]) :], "it went on from there"
    for machine in (first, second):
        assert same_tensors(machine.out / LAST, whole.out / LAST), "whole on each disk"
        assert same_model(machine.out, whole.out), "and so is the result"


@pytest.mark.full
def test_one_of_four_hosts_is_lost_and_comes_back(
    paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**LORA_TP, "sharding_parallel_degree": 2, "sharding": "stage2", "gradient_accumulation_steps": 1}
    whole = undisturbed(tmp_path, paddle, 4, **keys)
    with cluster(tmp_path, paddle, 4) as machines:
        words = {**keys, "nnodes": 4, "master": f"{machines[0].address}:8080", "save_on_each_node": True}
        launchers = [machine.train(words) for machine in machines]
        lose(launchers[2], machines[2].out)
        assert LAST not in saved(machines[0].out), "it must be lost in the middle"
        launchers[2] = machines[2].train(words)
        assert [m.wait(PATIENCE_S) for m in launchers] == [0] * 4, stories(launchers)

    assert curve(machines[0].out) == curve(whole.out), "no step is missing, done twice or different"
    for machine in machines:
        assert same_tensors(machine.out / LAST, whole.out / LAST), "whole on each disk"
        assert same_model(machine.out, whole.out), "and so is the result"
    monkeypatch.chdir(machines[0].disk)
    assert export_command(["model_name_or_path=model", "output_dir=out", "lora=True"]) == 0
    assert manifest.check(machines[0].out / "export").info["proof"]
