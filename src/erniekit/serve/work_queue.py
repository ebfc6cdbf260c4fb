"""A queue of work and the threads that do it, outside the event loop. Used by prompt_work.py and media_work.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from erniekit.data.tokenizer import Tokenizer
from erniekit.serve.prompt_worker import Failed

LEFT_S = 1.0  # how long work may go on for a client that has left


class Busy(Exception):
    """Too much waits; retry later."""


class Late(Exception):
    """The deadline passed; what was begun is abandoned."""


class Stuck(Exception):
    """All threads are beyond their deadline."""


class Killable(Protocol):
    def kill(self, task: QueuedTask | None = None) -> None:
        """The process; with a task, only if that is what it works on."""


@dataclass(eq=False)
class QueuedTask:
    work: Any  # PromptTask, or a MediaPiece
    tokenizer: Tokenizer | None
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    ends: float  # the deadline, on the monotonic clock
    process: Killable | None = None  # that does it
    late: bool = False  # its deadline passed
    turn: Any = None  # its owner, for a queue that chooses

    def settle(self, result: Any) -> None:
        _settle(self.result, result)


Choose = Callable[[Sequence[QueuedTask], Sequence[QueuedTask]], QueuedTask | None]


def first(waiting: Sequence[QueuedTask], running: Sequence[QueuedTask]) -> QueuedTask | None:
    return waiting[0]


@dataclass(eq=False)
class WorkerSlot:
    """A thread, and the work it is at."""

    task: QueuedTask | None = None


class WorkQueue:
    """A queue and the threads that work it off. A thread that is beyond a deadline counts as lost: another takes its
    place, up to twice as many, and it ends when it comes back."""

    def __init__(
        self,
        name: str,
        threads: int,
        queue: int,
        do: Callable[[QueuedTask], Any],
        leave: Callable[[], None],
        grace_s: float,
        choose: Choose = first,
    ) -> None:
        """leave: called at a thread's end, in it. grace_s: between a deadline and the thread's counting as lost.
        choose: of those that wait, in the order they came, with those that run; None: none of them may start now."""
        self.name, self.threads, self.queue, self.do, self.leave = name, threads, queue, do, leave
        self.grace_s, self.choose = grace_s, choose
        self.waiting: deque[QueuedTask] = deque()
        self.slots: list[WorkerSlot] = []
        self._lock = threading.Condition()
        self._ended = False

    def put(self, task: QueuedTask) -> None:
        with self._lock:
            lost = self._lost()
            if len(lost) >= 2 * self.threads:
                raise Stuck
            free = sum(slot.task is None for slot in self.slots)
            unstarted = max(0, self.threads - (len(self.slots) - len(lost)))
            if len(self.waiting) >= self.queue + free + unstarted:
                raise Busy
            self.waiting.append(task)
            if free < len(self.waiting) and unstarted:
                slot = WorkerSlot()
                thread = threading.Thread(target=self._run, args=(slot,), name=f"{self.name} prompts", daemon=True)
                self.slots.append(slot)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads to give
                    self.slots.remove(slot)
                    if not self.slots:
                        self.waiting.remove(task)
                        raise Busy from None
            self._lock.notify()

    def drop(self, task: QueuedTask) -> None:
        """What waits is forgotten; what runs goes on, and its result is not looked at."""
        with self._lock:
            if task in self.waiting:
                self.waiting.remove(task)

    def _lost(self) -> list[WorkerSlot]:
        late = time.monotonic() - self.grace_s
        return [slot for slot in self.slots if slot.task is not None and slot.task.ends < late]

    def counts(self) -> tuple[int, int, int]:
        """(running, waiting, lost)."""
        with self._lock:
            return sum(slot.task is not None for slot in self.slots), len(self.waiting), len(self._lost())

    def end(self) -> list[QueuedTask]:
        """No thread takes another task; those that waited or run are given back."""
        with self._lock:
            self._ended = True
            left = [*self.waiting, *(slot.task for slot in self.slots if slot.task is not None)]
            self.waiting.clear()
            self._lock.notify_all()
        return left

    def _run(self, slot: WorkerSlot) -> None:
        while (task := self._next(slot)) is not None:
            try:
                result = self.do(task)
            except Exception as error:
                result = Failed("fault", f"{type(error).__name__}: {error}"[:400])
            with self._lock:
                slot.task = None
                self._lock.notify_all()  # one that could not start meanwhile may start now, in another thread
            try:
                task.loop.call_soon_threadsafe(_settle, task.result, result)
            except RuntimeError:  # that loop is closed
                pass
        self.leave()

    def _next(self, slot: WorkerSlot) -> QueuedTask | None:
        with self._lock:
            while not self._ended and len(self.slots) <= self.threads + len(self._lost()):
                running = [other.task for other in self.slots if other.task is not None]
                task = self.choose(self.waiting, running) if self.waiting else None
                if task is not None:
                    self.waiting.remove(task)
                    slot.task = task
                    return task
                self._lock.wait()
            self.slots.remove(slot)
            return None


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


async def result_of(queue: WorkQueue, task: QueuedTask) -> Any:
    """The task's result, once it is done. Raises Busy, Late or Stuck; cancelling it drops the work."""
    queue.put(task)
    alarm = task.loop.call_later(task.ends - time.monotonic(), _settle, task.result, Late())
    try:
        found = await task.result
    except asyncio.CancelledError:
        queue.drop(task)
        task.loop.call_later(LEFT_S, _kill, task)
        raise
    finally:
        alarm.cancel()
    if isinstance(found, Late):
        queue.drop(task)
        _kill(task)
        task.late = True
        raise found
    return found


def _kill(task: QueuedTask) -> None:
    if task.process is not None:
        task.process.kill(task)
