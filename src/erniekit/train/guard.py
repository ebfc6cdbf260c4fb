"""What stops or slows a run before it does harm: signals, and losses that are not numbers. Used by train/trainer.py."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from erniekit.checkpoint.state import TrainState
from erniekit.errors import ErnieKitError, Preempted, stopped_unsaved
from erniekit.log import emit, warn
from erniekit.parallel.compiled import is_of_compiler
from erniekit.printable import counted
from erniekit.train.step import StepResult

TELLS_AFTER_S = 3.0  # most steps are over by then
LAST_WORDS_S = 2.0  # to look at the output folder and write two lines
_active: list[Signals] = []


def _close_wakeup_in_child() -> None:
    """In a forked child, which inherits the pipe: Ctrl-C reaches parent and child, and must not count twice."""
    if _active:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_close_wakeup_in_child)


class Signals:
    """SIGTERM, SIGUSR1 and Ctrl-C request a stop at the end of the step; a second one stops at once. While a run is
    prepared (`preparing`) there is nothing to save and no step to wait for: it is left at once.

    A handler runs between two steps of the interpreter, and a rank that waits for its peers in C++ comes to none. So
    the system's own note of each signal (its number, through a pipe) goes to a thread, which counts as well.
    """

    WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, newest: Callable[[], str] | None = None) -> None:
        """newest: the name of the checkpoint that the same command resumes from, or "". Asked when a second signal ends
        the run; None where a launcher says so."""
        self._newest, self._ending = newest, threading.Lock()
        self.requested: str | None = None
        self.requested_at = 0.0
        self.preparing = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._listen, name="erniekit-signals", daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _active.append(self)
        for number in self.WATCHED:
            self._before[number] = signal.signal(number, self._on)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        _active.remove(self)
        os.write(self._writer, b"\0")  # no signal has this number: the end
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    @contextmanager
    def ends_compilers(self) -> Iterator[None]:
        """A terminal's Ctrl-C and a scheduler's signal reach the compilers that torch has started, too. What torch then
        raises is the stop, and no fault."""
        try:
            yield
        except Exception as error:
            if self.requested is None or not is_of_compiler(error):
                raise
            raise Preempted(f"{self.requested}: stopped while layers were compiled, without a new save") from error

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self._end(number)
        self.requested, self.requested_at = signal.Signals(number).name, time.monotonic()
        if self.preparing:
            raise Preempted(f"{self.requested}: stopped while the run was prepared, so there is nothing new to save")

    def _end(self, number: int) -> NoReturn:
        """In the handler and in the thread: whoever comes second lets the first write. Neither waits for a lock of a
        stream, which the main thread may hold, nor for a reader of stderr."""
        if self._ending.acquire(timeout=LAST_WORDS_S) and self._newest is not None:
            with suppress(Exception):
                words = "".join(f"{line}\n" for line in stopped_unsaved(number, self._newest()))
                if select.select([], [2], [], 0)[1]:
                    os.write(2, words.encode())
        os._exit(128 + number)

    def _listen(self) -> None:
        count = 0
        while number := os.read(self._reader, 1)[0]:
            if number not in self.WATCHED:
                continue
            count += 1
            if count == 2:
                self._end(number)
            if not select.select([self._reader], [], [], TELLS_AFTER_S)[0]:  # a step that compiles takes minutes
                emit("stopping after this step, with a save; a second signal (Ctrl-C) ends the run now, without one")


class NotFinite(ErnieKitError):
    """Too many steps in a row gave a loss or gradient that is not a number, or an evaluation did."""

    exit_code = 3


class FiniteGuard:
    """Counts steps that were skipped; decides when a run goes back, and when it ends."""

    def __init__(self, max_bad_steps: int = 5, own_loss: Callable[[], str] | None = None) -> None:
        """own_loss: the name of a loss function of the user's that gave such numbers; empty where it did not."""
        self.max_bad_steps, self._own_loss = max_bad_steps, own_loss
        self.bad_packs: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=32)  # (step, packs) of skipped steps

    def after(self, result: StepResult, state: TrainState, packs: tuple[int, ...]) -> bool:
        """Books the step; True when the last checkpoint should be restored and this stretch of data skipped."""
        if result.applied:
            state.bad_in_a_row = 0
            return False
        state.skipped_steps += 1
        state.bad_in_a_row += 1
        self.bad_packs.append((result.step, packs))
        skipped = "update skipped" + (" where gradients are not numbers" if result.partly else "")
        own = self._own_loss() if self._own_loss is not None else ""
        blamed = f", which the loss function {own} gave" if own else ""
        warn(
            f"step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}{blamed}: {skipped} "
            f"({state.bad_in_a_row} in a row, packs {_span(packs)})"
        )
        if state.bad_in_a_row < self.max_bad_steps:
            return False
        if own:  # earlier weights would not change what it computes
            raise self._own_report(own, state)
        if state.rollbacks:
            raise self.report(state)
        return True

    def report(self, state: TrainState) -> NotFinite:
        return NotFinite(
            f"{counted(state.bad_in_a_row, 'step')} in a row gave a loss that is not a number, also after going back "
            "once",
            where=self._places(),
            fix="lower learning_rate, look at these rows of the data, or train in fp32 (compute_type: fp32)",
        )

    def _own_report(self, own: str, state: TrainState) -> NotFinite:
        return NotFinite(
            f"the loss function {own} gave losses or gradients that are not finite, from finite numbers, "
            f"{counted(state.bad_in_a_row, 'step')} in a row",
            where=self._places(),
            fix="bound what it takes the logarithm or root of, or divides by: clamp(min=1e-6)",
        )

    def _places(self) -> str:
        return "; ".join(f"step {step}: packs {_span(packs)}" for step, packs in self.bad_packs)


def _span(packs: tuple[int, ...]) -> str:
    return f"{min(packs)}-{max(packs)}" if packs else "none"
