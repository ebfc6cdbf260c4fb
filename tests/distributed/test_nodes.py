"""Several hosts on one machine: a network namespace each, joined by a wire, with nothing but addresses in common."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from erniekit.cli.launch import Launch, start

sys.path.insert(0, str(Path(__file__).parent))

from launchers import WORKER, Launcher, forked

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    def run(self, folder: Path, what: Callable[[], int]) -> Launcher:
        """`what` in a child of this process that lives on this host."""

        def inside() -> int:
            fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(fd)
            return what()

        return forked(folder, inside)


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
    made = [Host(f"ek{word}-{k}", f"10.77.0.{k + 1}") for k in range(2)]
    wires = [f"ek{word}{k}" for k in range(2)]
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


def job(hosts: list[Host], folder: Path, numbered: bool, *words: object, max_restarts: int = 0) -> list[Launcher]:
    """The same command on every host, each with a folder of its own for logs."""
    common = Launch(1, nnodes=2, address=hosts[0].address, port=8080, join_timeout_s=60.0, max_restarts=max_restarts)

    def launch(node: int) -> Callable[[], int]:
        mine = replace(common, node_rank=node if numbered else None, log_dir=folder / f"host-{node}")
        return lambda: start(mine, [sys.executable, WORKER, *map(str, words)])

    return [host.run(folder / f"host-{node}", launch(node)) for node, host in enumerate(hosts)]


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
