"""One process with torch imported; it forks the ranks of a run on demand, before any process group or thread exists.
Started by rank_runs.py: jobs come as JSON lines on stdin, process ids and exit codes leave on stdout."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import rank_faults
import torch
from tqdm import tqdm

from erniekit.api import run as train_here
from erniekit.cli import main
from erniekit.launch import agent, failure  # noqa: F401 - so that no rank has to

ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def child(job: dict[str, Any], rank: int, port: str) -> None:
    """Does not return. As `python -m erniekit.cli.launch_rank train ...`, or as the launcher itself."""
    code = 99
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody outlives the test
        folder = Path(job["logs"])
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        if job["launcher"]:
            os.chdir(folder)
            code = main.main(["train", *job["words"]])
        else:
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=job["ranks"], MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ.update({name: str(value) for name, value in place.items()})
            sizes = job["two_files"], job["together"]
            rank_faults.install(rank, job["faults"], folder / f"journal-{rank}.jsonl", *sizes)
            sys.argv = ["launch_rank", "train", *job["words"]]
            try:
                runpy.run_module("erniekit.cli.launch_rank", run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException as error:
        os.write(2, f"the test itself failed: {error!r}\n".encode())
    finally:
        os._exit(code)


def serve() -> None:
    running: dict[int, tuple[int, int, int]] = {}  # pidfd -> job, rank, pid
    lines = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - select and readline must see the same
    while True:
        ready, _, _ = select.select([lines, *running], [], [])
        for fd in ready:
            if fd is lines:
                line = lines.readline()
                if not line:
                    return
                start(json.loads(line), running)
                continue
            job, rank, pid = running.pop(fd)
            ended = time.monotonic()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
            tell(job=job, rank=rank, code=code, at=ended)


def start(job: dict[str, Any], running: dict[int, tuple[int, int, int]]) -> None:
    port, pids = free_port(), []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            child(job, rank, port)
        pids.append(pid)
        running[os.pidfd_open(pid)] = (job["job"], rank, pid)
    tell(job=job["job"], pids=pids, at=time.monotonic())


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def warm(words: list[str]) -> None:
    """One step in this process imports what a first step imports; its threads must be gone before the first fork."""
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    train_here("train", *words)
    sys.stdout = out
    assert threading.active_count() == 1, threading.enumerate()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread of C++ would not survive a fork"


if __name__ == "__main__":
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a thread, too
    for name in ALONE:
        os.environ.pop(name, None)
    warm(sys.argv[1:])
    gc.collect()
    gc.freeze()  # every run of a rank collects garbage at its end
    tell(ready=True)
    serve()
