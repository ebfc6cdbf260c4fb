"""A pool of rank processes, started once a session: `import torch` costs two seconds a process, a test should not.

`Ranks.run(n, function, *args)` makes the first n of them a gloo world and calls function(*args) in each.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 240.0  # seconds a call may take before the pool is torn down; three ranks import torch in the first


class RankFailed(AssertionError):
    """One rank raised; its traceback is the message."""


class Ranks:
    def __init__(self, most: int = 8) -> None:
        self.most = most
        self._workers: list[tuple[subprocess.Popen, socket.socket]] = []

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = socket.socketpair()
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                env.pop(name, None)
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
            process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
            theirs.close()
            ours.settimeout(TIMEOUT)
            self._workers.append((process, ours))

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each of the ranks returned, in order. `function` is a module-level function of a test file."""
        self._start(count)
        file = Path(sys.modules[function.__module__].__file__ or "").resolve()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(count):
                job = (rank, count, f"{folder}/store", str(file), function.__qualname__, args)
                _send(self._workers[rank][1], job)
            answers = self._answers(count)
        failed = [(rank, text) for rank, (ok, text) in sorted(answers.items()) if not ok]
        if failed or len(answers) < count:
            self.close()  # the others may hang in a collective with the dead one
            silent = [rank for rank in range(count) if rank not in answers]
            words = [f"rank {rank}:\n{text}" for rank, text in failed]
            raise RankFailed("\n".join([*words, f"no answer from ranks {silent}" if silent else ""]))
        return [answers[rank][1] for rank in range(count)]

    def _answers(self, count: int) -> dict[int, tuple[bool, Any]]:
        """As they come; once one rank has failed the others have a moment, not the whole time."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT
        with selectors.DefaultSelector() as watch:
            for rank in range(count):
                watch.register(self._workers[rank][1], selectors.EVENT_READ, rank)
            while len(answers) < count and (left := deadline - time.monotonic()) > 0:
                for key, _ in watch.select(left):
                    watch.unregister(key.fileobj)
                    try:
                        answers[key.data] = _receive(key.fileobj)  # type: ignore[arg-type]
                    except (EOFError, OSError):
                        answers[key.data] = (False, "the process died")
                    if not answers[key.data][0]:
                        deadline = min(deadline, time.monotonic() + 3.0)
        return answers

    def close(self) -> None:
        for process, link in self._workers:
            link.close()
            process.kill()
            process.wait()
        self._workers = []


def _send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    link.sendall(struct.pack("!Q", len(data)) + data)


def _receive(link: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        parts = []
        while count:
            part = link.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    return pickle.loads(exactly(struct.unpack("!Q", exactly(8))[0]))


def _serve(link: socket.socket) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    modules: dict[str, Any] = {}
    while True:
        try:
            rank, world, store, file, name, args = _receive(link)
        except (EOFError, OSError):
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        try:
            if file not in modules:
                spec = importlib.util.spec_from_file_location(f"ranked_{len(modules)}", file)
                assert spec is not None
                assert spec.loader is not None
                modules[file] = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = modules[file]
                spec.loader.exec_module(modules[file])
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            function = modules[file]
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _send(link, answer)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
