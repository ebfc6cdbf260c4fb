"""Joining: ranks on unlike devices find out before they talk, and say so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

CODE = """
import os, socket, sys, time
from types import SimpleNamespace
from erniekit.devices.cpu import CpuDevice
from erniekit.devices.cuda import CudaDevice
from erniekit.errors import DeviceError
from erniekit.parallel.world import leave, open_world
section = SimpleNamespace(pipeline_parallel_degree=1, data_parallel_degree=1, sharding_parallel_degree=1,
    context_parallel_degree=1, sep_parallel_degree=1, tensor_parallel_degree=1, sequence_parallel=False, sharding=(),
    virtual_pp_degree=1, pp_seg_method=(), islands=())
class Unknown(CpuDevice):
    backend = "cpu:chipccl"
class Twice(CpuDevice):
    backend = "cpu:gloo,cpu:gloo"
devices = {"cpu": CpuDevice("CPU", "cpu", 0), "gpu": CudaDevice("card", "cuda", 0),
    "unknown": Unknown("Chip", "cpu", 0), "twice": Twice("Chip", "cpu", 0)}
import torch.distributed as dist
real, (device, habit) = dist.TCPStore.get, sys.argv[1:]
def get(store, key):
    if habit == "dies":
        os._exit(9)
    time.sleep(0.3 if habit == "reads late" else 0)
    while habit == "reads when the host is gone":
        with socket.socket() as probe:
            if probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
                break
        time.sleep(0.01)
    return real(store, key)
dist.TCPStore.get = get
try:
    world = open_world(section, devices[device])
    print("joined", world.layout.dp, sum(world.gather(world.rank + 1)))
    leave()
except DeviceError as error:
    print(error)
    sys.exit(error.exit_code)
except dist.DistError as error:
    print(error)
    sys.exit(1)
"""


def start(kinds: list[str], habits: dict[int, str] | None = None) -> list[tuple[int, str]]:
    """Exit code and last words of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, kind in enumerate(kinds):
        env = dict(RANK=str(rank), WORLD_SIZE=str(len(kinds)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        command = [sys.executable, "-c", CODE, kind, (habits or {}).get(rank, "")]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        processes.append(subprocess.Popen(command, env={**env, "PATH": "", "OMP_NUM_THREADS": "1"}, **pipes))
    said = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, words) for process, words in zip(processes, said)]


def test_ranks_on_unlike_devices_all_say_so_however_late_one_reads() -> None:
    """Rank 0 hosts the store: it may not leave before the last one has read."""
    for code, said in start(["cpu", "gpu", "cpu"], {2: "reads late"}):
        assert "different devices" in said
        assert "cpu: rank 0, nvidia: rank 1, cpu: rank 2" in said
        assert "islands: [gpu:8, iluvatar_gpu:8]" in said
        assert code == 2


@pytest.mark.parametrize(
    ("kind", "said"), [("unknown", "chipccl"), pytest.param("twice", "'cpu:gloo,cpu:gloo'", marks=pytest.mark.full)]
)
def test_a_collective_backend_that_torch_does_not_have_is_refused_on_every_rank(kind: str, said: str) -> None:
    for code, words in start([kind, kind], {1: "reads late"}):
        assert f"error: Chip names the collective backend {said}, which torch " in words
        assert f"where: __main__.{kind.capitalize()}.backend" in words
        assert code == 2


@pytest.mark.full  # what every other test of ranks needs
def test_like_ranks_join_and_gather() -> None:
    assert [said.strip() for _, said in start(["cpu", "cpu"])] == ["joined 2 3", "joined 2 3"]


def test_a_rank_that_loses_the_store_says_that_another_ended_first() -> None:
    (died, _), (code, said) = start(["cpu", "cpu"], {0: "dies", 1: "reads when the host is gone"})
    assert died == 9
    assert "rank 1 could not connect to the others" in said
    assert "where another rank ended first, its log says why" in said
    assert code == 1


@pytest.mark.parametrize(
    "missing", ["MASTER_ADDR", *(pytest.param(name, marks=pytest.mark.full) for name in ("RANK", "MASTER_PORT"))]
)
def test_a_variable_without_which_ranks_do_not_meet_is_named(missing: str) -> None:
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "8080"}
    ranks.pop(missing)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    code = CODE.replace("except DeviceError", "except ConfigError").replace("import DeviceError", "import ConfigError")
    ran = subprocess.run(
        [sys.executable, "-c", code, "cpu", "at once"],
        env={**env, **ranks},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert f"WORLD_SIZE is 2, and {missing} is not set" in ran.stdout + ran.stderr
