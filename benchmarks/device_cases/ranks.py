"""Several ranks of a run on one card, over NCCL: each says it is another host, and they talk over sockets."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("profiled_train.py")
SOURCES = (*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.glob("*.py"))
# Several sockets: what fully_shard gathers in a step are gigabytes.
NCCL = dict(
    NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0", NCCL_IB_DISABLE="1",
    NCCL_SOCKET_NTHREADS="4", NCCL_NSOCKS_PERTHREAD="4",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_once(kept: Path, ranks: int, **keys: Any) -> tuple[list[dict], list[list], str]:
    """The same, but read from the folder `kept` where this code has run so before on such a card: what layouts are
    compared with need not run again for each."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.cuda.get_device_name()} {ranks}".encode())
    digest.update(json.dumps({k: v for k, v in keys.items() if not str(v).startswith("/")}, sort_keys=True).encode())
    named = [Path(v) for v in keys.values() if str(v).startswith("/")]
    given = [path / "config.json" if path.is_dir() else path for path in named]
    for file in sorted([*SOURCES, *(path for path in given if path.is_file())]):
        digest.update(file.read_bytes())
    found = kept / f"{digest.hexdigest()[:16]}.json"
    if not found.exists():
        with tempfile.TemporaryDirectory() as folder:
            answer = run_ranks(Path(folder) / "run", ranks, **keys)
        found.write_text(json.dumps(answer))
    steps, kernels, said = json.loads(found.read_text())
    return steps, kernels, said


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
