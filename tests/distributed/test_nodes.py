"""Several hosts on one machine: a network namespace each, joined by a wire, with nothing but addresses in common."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from erniekit.launch import heartbeat
from erniekit.launch.plan import LaunchPlan
from erniekit.launch.start import start

sys.path.insert(0, str(Path(__file__).parent))

from launchers import LATE_S, WORKER, Launcher, forked, wait_for, wait_for_words

from support.processes import alive

CLONE_NEWNET = 0x40000000
STARTED: list[Launcher] = []  # by the test that runs


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """A launcher of a test that failed may wait for a machine that never comes."""
    yield
    for launcher in STARTED:
        if alive(launcher.pid):
            launcher.kill(signal.SIGKILL)  # its rank ends with it
    STARTED.clear()


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    wire: str = "wire"

    def plug(self, state: str) -> None:
        """`down`: as if its cable were pulled. No connection is closed by that, packets just vanish."""
        ip("-n", self.name, "link", "set", self.wire, state)

    def run(self, folder: Path, what: Callable[[], int]) -> Launcher:
        """`what` in a child of this process that lives on this host."""

        def inside() -> int:
            fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(fd)
            return what()

        STARTED.append(forked(folder, inside))
        return STARTED[-1]


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    word = uuid.uuid4().hex[:6]
    wires = [f"ek{word}{k}" for k in range(2)]
    made = [Host(f"ek{word}-{k}", f"10.77.0.{k + 1}", wires[k]) for k in range(2)]
    try:
        try:
            for host in made:
                ip("netns", "add", host.name)
            ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
            for host, wire in zip(made, wires, strict=True):
                ip("link", "set", wire, "netns", host.name)
                inside = ["-n", host.name]
                ip(*inside, "addr", "add", f"{host.address}/24", "dev", wire)
                ip(*inside, "link", "set", wire, "up")
                ip(*inside, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def job(hosts: list[Host], folder: Path, numbered: bool, *words: object, **keys: Any) -> list[Launcher]:
    """The same command on every host, each with a folder of its own for logs."""
    return [join(hosts, node, folder / f"host-{node}", numbered, *words, **keys) for node in range(len(hosts))]


def join(hosts: list[Host], node: int, logs: Path, numbered: bool, *words: object, **keys: Any) -> Launcher:
    common = LaunchPlan(1, nnodes=2, address=hosts[0].address, port=8080, join_timeout_s=60.0, max_restarts=0)
    mine = replace(common, node_rank=node if numbered else None, log_dir=logs, **keys)
    return hosts[node].run(logs, lambda: start(mine, [sys.executable, WORKER, *map(str, words)]))


@pytest.mark.full
def test_ranks_on_two_hosts_reach_each_other(hosts: list[Host], tmp_path: Path) -> None:
    """Both hosts have the same name, which leads nowhere: only MASTER_ADDR does. Numbered on arrival."""
    launchers = job(hosts, tmp_path, False, "add_ranks", tmp_path)
    assert [m.wait() for m in launchers] == [0, 0], [m.said() for m in launchers]
    logs = {path.parent.name: path.name for path in tmp_path.glob("host-*/workerlog.?")}
    assert logs == {"host-0": "workerlog.0", "host-1": "workerlog.1"}, "numbered by address"
    assert all("sum 3" in path.read_text() for path in tmp_path.glob("host-*/workerlog.?"))


@pytest.mark.full
@pytest.mark.parametrize("numbered", [True, False])
def test_a_rank_killed_on_one_host_restarts_the_job_on_both(hosts: list[Host], tmp_path: Path, numbered: bool) -> None:
    """Collectives over the wire, before and after; each host shows what happened."""
    launchers = job(hosts, tmp_path, numbered, "add_ranks", tmp_path, 6, 1, max_restarts=1)
    assert [m.wait() for m in launchers] == [0, 0], [m.said() for m in launchers]
    assert (tmp_path / "killed").exists(), "the fault must really happen"
    for rank in (0, 1):
        steps = [word.split(":") for word in (tmp_path / f"steps-{rank}").read_text().split()]
        assert [(int(step), total) for step, _, total in steps] == [(k, "3") for k in range(6)]
        assert [attempt for _, attempt, _ in steps] == ["0"] * 3 + ["1"] * 3
    for m in launchers:
        assert m.said()[1].startswith("error: rank 1 was ended by SIGKILL"), m.said()
    assert sorted(path.name for path in tmp_path.glob("host-*/workerlog.?")) == ["workerlog.0", "workerlog.1"]


def test_numbered_hosts_share_a_users_error(hosts: list[Host], tmp_path: Path) -> None:
    launchers = job(hosts, tmp_path, True, "user_error", tmp_path)
    assert [m.wait() for m in launchers] == [2, 2], [m.said() for m in launchers]
    assert all(m.said()[1] == "error: no rows" for m in launchers)


# --- lost


@pytest.mark.full
def test_a_host_that_is_killed_is_named_and_the_job_goes_on_when_it_is_back(hosts: list[Host], tmp_path: Path) -> None:
    """kill -9 of all that runs there: the connections are closed, so the rank here has only lost its peer."""
    words = (True, "add_until_enough", tmp_path)
    output = tmp_path / "out"
    for name in ("checkpoint-6", "checkpoint-12", "checkpoint-20"):
        (output / name).mkdir(parents=True)
        (output / name / "MANIFEST.json").touch()
    (output / "checkpoint-20" / "MANIFEST.json").unlink()  # not whole
    stays, killed = job(hosts, tmp_path, *words, max_restarts=1, output=output)
    wait_for(*(tmp_path / f"steps-{rank}-0" for rank in (0, 1)))
    killed.kill(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    gone = time.monotonic()
    told = wait_for_words(stays, "restart 1 of 1")
    assert time.monotonic() - gone < LATE_S
    assert told[1].startswith("error: lost: machine 1 of 2, "), told
    assert told[1].endswith("(10.77.0.2), rank 1"), told
    assert told[-1] == "restart 1 of 1 as soon as all machines are there, from checkpoint-12"
    assert "Traceback" not in "\n".join(told)

    back = join(hosts, 1, tmp_path / "host-1-again", *words, max_restarts=1)
    wait_for(*(tmp_path / f"steps-{rank}-1" for rank in (0, 1)))
    (tmp_path / "enough").touch()
    assert [stays.wait(), back.wait()] == [0, 0], [stays.said(), back.said()]


def pull_the_cable(hosts: list[Host], folder: Path, attempt: int = 0) -> None:
    """Of the second host, in the middle of collectives; nobody is told, nobody dies of it."""
    wait_for(*(folder / f"steps-{rank}-{attempt}" for rank in (0, 1)))
    hosts[1].plug("down")
    for _ in range(4):  # a rank that stood still may still have one to finish
        time.sleep(0.5)
        before = [(folder / f"steps-{rank}-{attempt}").stat().st_size for rank in (0, 1)]
        time.sleep(0.5)
        after = [(folder / f"steps-{rank}-{attempt}").stat().st_size for rank in (0, 1)]
        if before == after:
            break
    assert before == after, "the fault must really happen: no collective gets through"
    assert all(alive(int((folder / f"pid-{rank}-{attempt}").read_text())) for rank in (0, 1)), "and it is silent"


# Numbered on arrival, the lost machine has to miss its heartbeats first: ten seconds more.
@pytest.mark.full
@pytest.mark.parametrize("numbered", [True, False])
def test_a_pulled_cable_is_noticed_on_both_sides_and_the_job_goes_on_when_the_host_is_back(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbered: bool
) -> None:
    monkeypatch.setattr(heartbeat, "LOST_S", 4.0)
    words = (numbered, "add_until_enough", tmp_path)
    stays, cut_off = job(hosts, tmp_path, *words, max_restarts=2)
    pull_the_cable(hosts, tmp_path)
    pulled = time.monotonic()
    try:
        assert cut_off.wait(60) == 1, "the one that cannot reach the meeting point leaves"
        assert time.monotonic() - pulled < 60  # by itself TCP waits a quarter of an hour
        told = wait_for_words(stays, "restart 1 of 2 as soon as all machines are there")
    finally:
        hosts[1].plug("up")
    assert told[1].startswith("error: lost: machine 1 of 2, "), told
    assert told[1].endswith("(10.77.0.2), rank 1"), told
    assert told[3] == "fix:   run the same command there; the others wait 60 s for it (join_timeout_s)"
    said = "\n".join(cut_off.said())
    assert "error: the other machines are gone: no answer from the rendezvous address, machine 0 of 2" in said
    assert "(10.77.0.1), rank 0" in said
    assert "fix:   run the same command on every machine; the run resumes from" in said
    assert "Traceback" not in said

    back = join(hosts, 1, tmp_path / "host-1-again", *words, max_restarts=2)
    wait_for(*(tmp_path / f"steps-{rank}-1" for rank in (0, 1)))
    (tmp_path / "enough").touch()
    assert [stays.wait(), back.wait()] == [0, 0], [stays.said(), back.said()]


@pytest.mark.full
def test_a_host_that_stays_away_ends_the_job_with_its_name(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "LOST_S", 3.0)
    waits, cut_off = job(hosts, tmp_path, True, "add_until_enough", tmp_path, max_restarts=1, join_timeout_s=8.0)
    pull_the_cable(hosts, tmp_path)
    try:
        assert [cut_off.wait(60), waits.wait(60)] == [1, 1], [cut_off.said(), waits.said()]
    finally:
        hosts[1].plug("up")
    assert any(line.startswith("error: not back within 8 s: machine 1 of 2, ") for line in waits.said()), waits.said()
