"""Joining: ranks on unlike devices find out before they talk, and say so."""

from __future__ import annotations

import socket
import subprocess
import sys

CODE = """
import sys
from types import SimpleNamespace
from erniekit.errors import DeviceError
from erniekit.parallel.world import leave, open_world
section = SimpleNamespace(pipeline_parallel_degree=1, data_parallel_degree=1, sharding_parallel_degree=1,
    context_parallel_degree=1, sep_parallel_degree=1, tensor_parallel_degree=1, sequence_parallel=False, sharding=(),
    virtual_pp_degree=1, pp_seg_method=())
try:
    world = open_world(section, sys.argv[1])
    print("joined", world.layout.dp, int(world.sum(world.rank + 1)))
    leave()
except DeviceError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def start(kinds: list[str]) -> list[tuple[int, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, kind in enumerate(kinds):
        env = dict(RANK=str(rank), WORLD_SIZE=str(len(kinds)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [sys.executable, "-c", CODE, kind]
        processes.append(subprocess.Popen(command, env={**env, "PATH": ""}, stdout=subprocess.PIPE, text=True))
    return [(p.wait(timeout=60), p.communicate()[0]) for p in processes]


def test_a_cpu_rank_and_a_cuda_rank_cannot_form_one_group() -> None:
    for code, said in start(["cpu", "cuda"]):
        assert code == 2
        assert "different devices" in said
        assert "cpu: ranks [0]" in said
        assert "cuda: ranks [1]" in said


def test_like_ranks_join_and_reduce() -> None:
    assert [said.strip() for _, said in start(["cpu", "cpu"])] == ["joined 2 3", "joined 2 3"]
