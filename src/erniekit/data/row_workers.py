"""Chunks of rows, worked on by processes of their own, in order. Used by tokenise.py and index.py.

A worker process runs `serve`. Nothing here imports torch, so workers start fast.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, TypeVar

from erniekit import heartbeat
from erniekit.errors import DataError

Rows = list[tuple[int, Any]]
Made = TypeVar("Made", covariant=True)


class RowWork(Protocol[Made]):
    """What a worker process is given: it travels there once, then makes something of each chunk of rows."""

    def work(self, batch: Rows) -> Made: ...


def in_parallel(chunks: Iterable[Rows], job: RowWork[Made], num_proc: int) -> Iterator[Made]:
    """What each chunk becomes, in order, from `num_proc` workers, at most two ahead of each."""
    workers = [RowWorker(job) for _ in range(num_proc)]
    free: queue.SimpleQueue[RowWorker[Made]] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def run(batch: Rows) -> Made:
        worker = free.get()
        try:
            return worker.run(batch)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(num_proc, thread_name_prefix="erniekit-tokenise")
    ahead: deque[Future[Made]] = deque()
    try:
        for batch in chunks:
            ahead.append(pool.submit(run, batch))
            if len(ahead) > 2 * num_proc:
                yield _awaited(ahead.popleft())
        while ahead:
            yield _awaited(ahead.popleft())
    finally:
        for worker in workers:
            worker.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def _awaited(work: Future[Made]) -> Made:
    """A chunk of videos may take minutes: the progress shows it."""
    while True:
        heartbeat.beat()
        wait([work], timeout=5)
        if work.done():
            return work.result()


class RowWorker(Generic[Made]):
    """A bare Python process. multiprocessing would either fork one that may hold torch's threads, or run the
    caller's script again in a new one, which breaks scripts without a `__main__` guard."""

    BOOT = (
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
        "from erniekit.data.row_workers import serve; serve()"
    )

    def __init__(self, job: RowWork[Made]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._send(sys.path)
        self._send(pickle.dumps(job))  # apart: a job that does not open must leave the pipe readable

    def run(self, batch: Rows) -> Made:
        try:
            self._send(batch)
            answer = pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise DataError(
                f"a tokenising process ended with exit code {self._process.wait()}",
                where=f"rows {batch[0][0]} to {batch[-1][0]}",
                fix="if it was killed for memory, lower dataset_num_proc",
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                pass

    def _send(self, value: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        pickle.dump(value, pipe, protocol=5)
        pipe.flush()


def serve() -> None:
    """The worker's loop: a job, then rows in and what it makes of them out until the parent closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    job: RowWork[Any] | Exception
    try:
        job = pickle.loads(pickle.load(requests))  # opens the tokenizer again, from its folder
    except Exception as error:
        job = error
    while True:
        try:
            batch = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = job if isinstance(job, Exception) else job.work(batch)
        except Exception as error:
            answer = error
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:  # the parent process was killed: its end of the pipe is closed
            os._exit(1)  # closing ours would flush it and fail again
