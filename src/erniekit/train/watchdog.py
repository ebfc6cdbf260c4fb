"""The hang watchdog: silence first gets the stacks of all threads written, then ends the process for a restart.

Every rank has its own, so all ranks of a hang write; the loop reports where it is by `phase`. Hooked in by recipes/.
"""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING

from erniekit import heartbeat
from erniekit.train import monitor
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.monitor import Beat, HangDetector, SharedHeartbeat, emit, headline, report_name, write_report

if TYPE_CHECKING:
    from erniekit.train.step import StepResult

EXIT_CODE = 70  # "ended for a restart"; a rank whose interpreter lock is held can only be killed (-9)
LONG = ("start", "eval", "save", "restore", "end")
# Times the limits of a step. Preparing (tokenising, reading weights, the first compilation) has the longest silences.
STRETCH = {"prepare": 20.0, **dict.fromkeys(LONG, 10.0)}
WARM_STEPS = 3  # these compile, connect and fill caches
# Faulthandler's own signal. A real-time one: users and schedulers have uses for SIGUSR1 and SIGUSR2.
STACKS_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


@dataclass(frozen=True)
class HangLimits:
    """Seconds of silence. 0: soft is ten median steps and at least a minute, hard is three times soft; -1: never.

    Progress is every finished step, every change of phase and every beat (heartbeat.py) of the training thread: one
    more batch evaluated, file read, tensor written. Phases that take long by nature have STRETCH times as long, and so
    have the first WARM_STEPS steps. Ranks enter and leave LONG phases together (they end in a collective): one that
    went ahead would wait for the others under a short limit.
    """

    soft_s: float = 0.0
    hard_s: float = 0.0

    def of(self, phase: str, median_step: float, steps: int) -> tuple[float, float]:
        soft = self.soft_s or max(60.0, 10 * median_step)
        soft = soft if soft > 0 else math.inf
        hard = self.hard_s or 3 * soft
        hard = hard if hard > 0 else math.inf
        stretch = STRETCH.get(phase, 10.0 if steps < WARM_STEPS else 1.0)
        return soft * stretch, hard * stretch


class Watchdog(Hook):
    """`with Watchdog(...) as dog:` around the run, and first among the hooks. All calls from the training thread."""

    def __init__(
        self,
        output_dir: Path,
        rank: int = 0,
        soft_s: float = 0.0,
        hard_s: float = 0.0,
        details: Callable[[], str] | None = None,
    ) -> None:
        """`details` may add text to a report, after the stacks are safe; by default the last collectives."""
        self.folder, self.rank, self.limits = output_dir / "hangs", rank, HangLimits(soft_s, hard_s)
        self.details = details or flight_recorder
        shortest = min(self.limits.of("", 0.0, WARM_STEPS))
        self._every = min(1.0, max(0.05, shortest / 20))
        self._heart_file, self._stacks_file = _shared_file("beats"), _shared_file("stacks")
        self._heart_file.truncate(monitor.SIZE)
        self._beats = SharedHeartbeat(self._heart_file.fileno())
        self._step, self._phase, self._since, self._busy = 1, "start", time.monotonic(), 0.0
        self._seconds: deque[float] = deque(maxlen=64)  # of the last steps, without their LONG phases
        self._median, self._steps = 0.0, 0
        self._stop, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="erniekit-watchdog", daemon=True)
        self._monitor: subprocess.Popen[bytes] | None = None
        self._listening = ExitStack()

    # The loop's side: a microsecond or two each.

    def phase(self, name: str) -> None:
        """Where the loop is from now on: data, forward/backward, collective, eval, save, ... That too is progress."""
        if self._stop.is_set():
            return
        now = time.monotonic()
        if self._phase not in STRETCH:
            self._busy += now - self._since
        self._phase, self._since = name, now
        soft, hard = self.limits.of(name, self._median, self._steps)
        self._beats.beat(now, soft, hard, self._step, name)

    def progress(self) -> None:
        """One piece further within a phase: an evaluation batch, a file, a tensor."""
        self.phase(self._phase)

    def beat(self, step: int) -> None:
        """Step `step` is done. What hangs from now on is reported under the next one."""
        self.phase(self._phase)
        self._seconds.append(self._busy)
        self._step, self._steps, self._busy, self._median = step + 1, self._steps + 1, 0.0, median(self._seconds)
        self.phase("after the step")

    def on_start(self, trainer: TrainingLoop) -> None:
        self._step = trainer.state.step + 1
        self.phase("start")

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self.beat(result.step)

    def on_end(self, trainer: TrainingLoop) -> None:
        self.phase("end")

    @property
    def doing(self) -> str:
        """What the loop is at, in words that follow "while"."""
        done = self._step - 1
        if self._phase == "save":
            return f"checkpoint-{done} was being saved"
        if self._phase == "prepare" or (self._phase in LONG and not self._steps):
            return "the run was being prepared"
        if self._phase in ("eval", "end", "restore"):
            return f"the run was at step {done} ({self._phase})"
        return f"step {self._step} was under way"

    # Starting and stopping.

    def __enter__(self) -> Watchdog:
        self.phase("start")
        self._listening.enter_context(heartbeat.listening(self.progress))
        faulthandler.register(STACKS_SIGNAL, file=self._stacks_file, all_threads=True, chain=False)
        self._thread.start()
        self._ready.wait(5)
        fds = (self._heart_file.fileno(), self._stacks_file.fileno())
        arguments = (os.getpid(), self.rank, self.folder.absolute(), self._every, int(STACKS_SIGNAL), *fds)
        command = [sys.executable, "-I", "-S", monitor.__file__, *map(str, arguments)]
        try:
            self._monitor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds, cwd="/"
            )
        except OSError as error:
            emit(f"no monitor process for rank {self.rank} ({error}); a held interpreter lock would go unnoticed")
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.close()
        self._stop.set()
        if self._monitor is not None:
            self._monitor.kill()
            self._monitor.wait()
        self._thread.join(5)
        faulthandler.unregister(STACKS_SIGNAL)
        if not self._thread.is_alive():
            self._beats.close()
            self._heart_file.close()
            self._stacks_file.close()

    # The thread's side.

    def _watch(self) -> None:
        thread = threading.get_native_id()
        self._beats.set_reported(0.0, thread)
        self._ready.set()
        detector = HangDetector(self._beats, self._every)
        monitor_ended = False
        while not self._stop.wait(self._every):
            state, beat, silence = detector.check()
            if state == "soft":
                self._report(beat, silence, thread)
            elif state == "hard":
                if self._beats.reported()[0] != beat.at:  # hard below soft
                    self._report(beat, silence, thread)
                emit(f"{headline(self.rank, beat, silence)}: ending with code {EXIT_CODE}, for a restart")
                if beat.phase == "collective":
                    emit(
                        f"rank {self.rank} may have been waiting for another: reports of all ranks are in {self.folder}"
                    )
                os._exit(EXIT_CODE)
            elif state == "back":
                emit(f"rank {self.rank} continues: step {beat.step}, phase {beat.phase}")
            code = self._monitor.poll() if self._monitor is not None and not monitor_ended else None
            if code is not None and not self._stop.is_set():
                monitor_ended = True
                emit(f"the monitor process of rank {self.rank} ended ({code}); only the thread watches")

    def _report(self, beat: Beat, silence: float, thread: int) -> None:
        path, head = self.folder / report_name(self.rank, beat.step), headline(self.rank, beat, silence)
        names = "\n".join(f"0x{t.ident or 0:016x} {t.name}" for t in threading.enumerate())
        try:
            write_report(str(path), head, os.getpid(), f"{names}\n".encode())
            with path.open("ab") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._beats.set_reported(beat.at, thread)
            emit(f"{head}; stacks in {path}")
        except Exception as error:  # whatever happens in here, the hard time-out must still come
            emit(f"{head}; its stacks could not be written to {path}: {error}")
            faulthandler.dump_traceback(2, all_threads=True)
            self._beats.set_reported(beat.at, thread)
        with suppress(Exception), path.open("ab") as file:
            file.write(f"\n{self.details()}\n".encode())


def _shared_file(name: str) -> IO[bytes]:
    """In memory where the system has that: a full disk must not hurt the one that reports on it."""
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create(f"erniekit-{name}"), "r+")
    return tempfile.TemporaryFile(buffering=0)


def flight_recorder(last: int = 16) -> str:
    """The last collectives as torch recorded them; "" where it does not (TORCH_FR_BUFFER_SIZE is 0 or unset).

    The ranks' numbers side by side show which rank never entered which one.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return ""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    lines = []
    for entry in json.loads(dump()).get("entries", [])[-last:]:
        group, sizes = entry["process_group"][-1], entry["input_sizes"]
        done = "done" if entry["retired"] else "not done"
        lines.append(f"{entry['collective_seq_id']} {entry['profiling_name']} {sizes} of {group}: {done}")
    return "\n".join(["last collectives:", *lines]) if lines else ""
