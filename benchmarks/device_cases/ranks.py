"""Several ranks of a run on one card, over NCCL: each says it is another host, and they talk over sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("profiled_train.py")
NCCL = dict(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0", NCCL_IB_DISABLE="1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(folder: Path, ranks: int, seconds: float = 240, **keys: Any) -> tuple[list[dict], list[list], str]:
    """The logged steps, each rank's kernels [name, microseconds of its launches] of some of them, rank 0's output."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({**keys, "output_dir": str(folder / "out")}))
    port, started = free_port(), []
    for rank in range(ranks):
        env = {**os.environ, **NCCL, "NCCL_HOSTID": f"rank{rank}", "OMP_NUM_THREADS": "2"}
        if ranks > 1:
            env |= dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
            env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        words = [sys.executable, str(RANK), str(recipe), str(folder / f"kernels-{rank}.json")]
        log = (folder / f"log-{rank}").open("w")
        started.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    said = [(folder / f"log-{rank}").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, (codes, "\n".join(text[-3000:] for text in said))
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return steps, [json.loads((folder / f"kernels-{rank}.json").read_text()) for rank in range(ranks)], said[0]
