"""A pool of rank processes, started once a session: one process imports torch and erniekit, which takes seconds, and
forks the others.

`Ranks.run(n, function, *args)` makes the first n of them a gloo world and calls function(*args) in each.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
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
TIMEOUT = 240.0  # seconds a call may take before the pool is torn down; the first waits for imports, too


FORK, KILL = b"f", b"k"  # what the process that forks ranks is asked for: one more, or an end to all


class RankFailed(AssertionError):
    """One rank raised; its traceback is the message."""


class Ranks:
    def __init__(self, forked: bool = True) -> None:
        """forked: False where ranks use a card, which torch refuses to processes that were forked; each then imports
        for itself."""
        self._forked = forked
        self._forker: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._workers: list[socket.socket] = []

    def _start(self, count: int) -> None:
        if self._forker is None:
            ours, theirs = socket.socketpair()
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                env.pop(name, None)
            role = "fork" if self._forked else "start"
            command = [sys.executable, str(Path(__file__)), role, str(theirs.fileno())]
            process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
            theirs.close()
            ours.settimeout(TIMEOUT)
            self._forker = process, ours
        while len(self._workers) < count:
            ours, theirs = socket.socketpair()
            socket.send_fds(self._forker[1], [FORK], [theirs.fileno()])
            assert self._forker[1].recv(1) == FORK, "the process that forks ranks died"
            theirs.close()
            ours.settimeout(TIMEOUT)
            self._workers.append(ours)

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each of the ranks returned, in order. `function` is a module-level function of a test file."""
        self._start(count)
        file = Path(sys.modules[function.__module__].__file__ or "").resolve()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(count):
                job = (rank, count, f"{folder}/store", str(file), function.__qualname__, args)
                _send(self._workers[rank], job)
            answers = self._answers(count)
        failed = [(rank, text) for rank, (ok, text) in sorted(answers.items()) if not ok]
        if failed or len(answers) < count:
            self._kill()  # the others may hang in a collective with the dead one
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
                watch.register(self._workers[rank], selectors.EVENT_READ, rank)
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

    def _kill(self) -> None:
        for link in self._workers:
            link.close()
        self._workers = []
        if self._forker is not None:
            self._forker[1].sendall(KILL)
            self._forker[1].recv(1)

    def close(self) -> None:
        self._kill()
        if self._forker is not None:
            process, link = self._forker
            link.close()
            process.wait(TIMEOUT)
            self._forker = None


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


def _import_for_all() -> None:
    import torch
    import torch.distributed.fsdp

    import erniekit.recipes.training  # noqa: F401 - so that no rank has to
    from support.disk import wait_for_no_disk
    from support.frozen import freeze_what_stays

    torch.set_num_threads(1)
    wait_for_no_disk()
    freeze_what_stays()


def _forked_rank(link: socket.socket, fd: int) -> int:
    pid = os.fork()
    if pid == 0:
        link.close()
        try:
            _serve(socket.socket(fileno=fd))
        finally:
            os._exit(0)
    return pid


def _started_rank(link: socket.socket, fd: int) -> int:
    os.set_inheritable(fd, True)
    return os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, str(Path(__file__)), "rank", str(fd))


def _ranks_on_demand(link: socket.socket, new_rank: Callable[[socket.socket, int], int]) -> None:
    """All of them end with the test process, whatever they wait for."""
    pids: list[int] = []
    while True:
        message, fds, _, _ = socket.recv_fds(link, 1, 1)
        if message == FORK:
            pids.append(new_rank(link, fds[0]))
            os.close(fds[0])
        else:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pids.clear()
        if not message:
            return
        link.sendall(message)


def _serve(link: socket.socket) -> None:
    import torch.distributed as dist

    from support.frozen import freeze_what_stays

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
            dist.barrier()  # a rank that has its answer at once must not leave while others still connect to it
            function = modules[file]
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _send(link, answer)
        freeze_what_stays()


if __name__ == "__main__":
    role, link = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    if role == "rank":
        _serve(link)
    elif role == "start":
        _ranks_on_demand(link, _started_rank)
    else:
        _import_for_all()
        _ranks_on_demand(link, _forked_rank)
