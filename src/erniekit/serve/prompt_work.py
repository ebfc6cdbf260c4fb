"""Prompt work of a server: rendering and tokenising, bounded in number, in waiting and in time. Used by api.py.

Short prompts are prepared in a few threads of this process and never wait for long ones. Long ones go to worker
processes: a thread can be neither ended nor kept from holding the interpreter lock, a process can be killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.data.tokenizer import Tokenizer
from erniekit.serve import prompt_worker
from erniekit.serve.prompt_worker import (
    ChatPrompt,
    Failed,
    PromptTask,
    SeenChat,
    TextPrompts,
    TokenizerSource,
    prepare,
)
from erniekit.serve.work_queue import LEFT_S, QueuedTask, WorkQueue, result_of
from erniekit.serve.worker_process import WorkerProcess

SHORT_CHARACTERS, SHORT_MESSAGES = 16_384, 64  # a prompt with more of either is long
DEADLINE_S = 30.0  # from a request's arrival to its ids
RENDER_S = 5.0  # of processor time for the chat template
SHORT_RENDER_S = 0.25  # the same in a thread that others wait for; what takes longer is given to a process


class Process(WorkerProcess):
    """Renders and tokenises long prompts."""

    def __init__(self) -> None:
        super().__init__(_start)

    def do(self, task: QueuedTask, seconds: float) -> Any:
        assert task.tokenizer is not None
        with self.at_work(task) as (requests, answers):
            try:
                prompt_worker.send(requests, (TokenizerSource.of(task.tokenizer), task.work, seconds))
                return prompt_worker.receive(answers)
            except (OSError, EOFError):
                self.reap()
                return Failed("slow", "the worker process was ended")


def _start() -> subprocess.Popen[bytes]:
    # Its own session: a Ctrl-C in the terminal is for the server to handle. Packages are found as here.
    root = str(Path(prompt_worker.__file__).parents[2])
    paths = os.pathsep.join([*(path for path in sys.path if path), root])
    return subprocess.Popen(
        [sys.executable, prompt_worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


@dataclass(frozen=True)
class PromptLimits:
    threads: int = 2
    processes: int = 2
    short_queue: int = 64
    long_queue: int = 16
    deadline_s: float = DEADLINE_S
    render_s: float = RENDER_S
    short_render_s: float = SHORT_RENDER_S
    short_characters: int = SHORT_CHARACTERS


@dataclass
class PromptLoad:
    """For /health and /metrics."""

    running: int = 0
    waiting: int = 0
    lost: int = 0  # threads beyond their deadline
    stuck: bool = False  # as many of them as there should be threads
    abandoned: int = 0  # prompts that were not ready at their deadline, so far

    def plus(self, other: PromptLoad) -> PromptLoad:
        return PromptLoad(
            self.running + other.running,
            self.waiting + other.waiting,
            self.lost + other.lost,
            self.stuck or other.stuck,
            self.abandoned + other.abandoned,
        )


@dataclass
class PromptWork:
    limits: PromptLimits = field(default_factory=PromptLimits)
    abandoned: int = 0  # deadlines that have passed

    def __post_init__(self) -> None:
        limits = self.limits
        self._short = WorkQueue("short", limits.threads, limits.short_queue, _in_thread, lambda: None, 0.0)
        self._long = WorkQueue("long", limits.processes, limits.long_queue, self._in_process, self._leave, LEFT_S)
        self._own = threading.local()  # a thread's process
        self._processes: list[Process] = []

    async def ids(
        self, what: ChatPrompt | TextPrompts | SeenChat, tokenizer: Tokenizer, most: int, seconds: float
    ) -> Any:
        """list[list[int]], of a SeenChat [VisionPrompt], or Failed. Raises Busy, Late or Stuck;
        cancelling it drops the work."""
        limits = self.limits
        ends = time.monotonic() + min(seconds, limits.deadline_s)
        if is_short(what, limits.short_characters):
            found = await self._done(self._short, PromptTask(what, most, limits.short_render_s), tokenizer, ends)
            if not isinstance(found, Failed) or found.kind != "slow":
                return found
        # Long from the start, or short with a slow template: other prompts must not wait for that.
        return await self._done(self._long, PromptTask(what, most, limits.render_s), tokenizer, ends)

    async def _done(self, queue: WorkQueue, work: PromptTask, tokenizer: Tokenizer, ends: float) -> Any:
        loop = asyncio.get_running_loop()
        task = QueuedTask(work, tokenizer, loop, loop.create_future(), ends)
        try:
            return await result_of(queue, task)
        finally:
            self.abandoned += task.late

    def _in_process(self, task: QueuedTask) -> Any:
        process = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = Process()
            self._processes.append(process)
        left = task.ends - time.monotonic()
        if left <= 0:
            return Failed("slow", "its time passed in the queue")
        task.process = process
        return process.do(task, left + LEFT_S)

    def _leave(self) -> None:
        process = getattr(self._own, "process", None)
        if process is not None:
            self._processes.remove(process)
            process.reap()

    def load(self) -> PromptLoad:
        short, long = self._short.counts(), self._long.counts()
        running, waiting, lost = (a + b for a, b in zip(short, long))
        return PromptLoad(running, waiting, lost, short[2] >= self.limits.threads, self.abandoned)

    def end(self) -> None:
        """Called in the event loop. Waiting requests get an error; no new work is started."""
        for task in (*self._short.end(), *self._long.end()):
            task.settle(Failed("stopping", ""))
        for process in list(self._processes):
            process.kill()


def _in_thread(task: QueuedTask) -> Any:
    assert task.tokenizer is not None
    return prepare(task.work, task.tokenizer)


def is_short(what: ChatPrompt | TextPrompts | SeenChat, most: int = SHORT_CHARACTERS) -> bool:
    if isinstance(what, TextPrompts):
        return sum(map(len, what.texts)) <= most
    if isinstance(what, SeenChat):
        return len(what.row.messages) <= SHORT_MESSAGES and what.characters <= most
    if len(what.messages) > SHORT_MESSAGES:
        return False
    return _size((what.messages, what.tools, what.variables), most) <= most


def _size(value: Any, most: int) -> int:
    """Characters in all its strings, and one for each thing in it; not counted on beyond `most`."""
    size, todo = 0, [value]
    while todo and size <= most:
        value = todo.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            todo += value.keys()
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
    return size
