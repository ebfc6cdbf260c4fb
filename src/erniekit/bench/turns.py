"""Ours and the peers in turn on one device: the order of their runs, and what is recorded of steps, memory and numbers.

Called by worker.py. Where all fit the card together all are built first and short turns alternate; else one is
built, measured and freed before the next, ours first and once more at the end.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from erniekit.bench.card import Reading, Watch, medians
from erniekit.bench.measure import GIB, Gauge
from erniekit.bench.ours import Ours
from erniekit.bench.peers import absent, peer_class
from erniekit.bench.runner import Runner, Task
from erniekit.log import emit

ROUNDS = 2


@dataclass
class Lane:
    """One runner and what is known of it so far."""

    runner: Runner
    seconds: list[float] = field(default_factory=list)
    first: list[dict[str, float]] = field(default_factory=list)  # numbers of the warm-up steps
    losses: list[float] = field(default_factory=list)  # of timed steps
    waited: float | None = None  # seconds for data, in timed steps; None: its data is in memory
    readings: list[Reading] = field(default_factory=list)  # of the card, meanwhile
    own: int = 0  # bytes it holds between its turns
    peak: int = 0  # bytes, without those of other trainers
    build_s: float = 0.0
    first_step_s: float = 0.0
    last_step_s: float = 0.0
    next_step: int = 0
    logits: torch.Tensor | None = None  # of the probe, on the host
    trainable: int = 0
    failed: str = ""
    built: bool = False

    @property
    def name(self) -> str:
        return self.runner.name

    def record(self) -> dict[str, Any]:
        if not self.seconds:
            return {"runner": self.name, "failed": self.failed or "not run"}
        step = statistics.median(self.seconds)
        out: dict[str, Any] = {
            "runner": self.name,
            "step_ms": 1000 * step,
            "step_ms_all": [round(1000 * s, 3) for s in self.seconds],
            "peak_gib": self.peak / GIB or None,
            "build_s": self.build_s,
            "compile_s": max(0.0, self.first_step_s - step),
            "trainable": self.trainable,
            "first_steps": self.first,
            "last_loss": self.losses[-1],
            "steps_run": self.next_step,
            **medians(self.readings),
        }
        if self.waited is not None:
            out["data_wait"] = min(1.0, self.waited / sum(self.seconds))
        if self.runner.note:
            out["note"] = self.runner.note
        if self.failed:
            out["failed"] = self.failed
        return out


class Turns:
    def __init__(self, task: Task, peers: tuple[str, ...], deadline: float | None, watch: Watch | None = None) -> None:
        """deadline: of time.monotonic(); what has not begun by then is not begun."""
        self.task, self.gauge, self.deadline = task, Gauge(task.hardware), deadline
        self.watch = watch or Watch(None)
        self.lanes = [Lane(Ours(task))]
        self.missing: dict[str, str] = {}
        self.profile: dict[str, Any] | None = None  # of ours
        self.busiest: float | None = None  # the largest share an expert had in ours
        for name in peers:
            if reason := absent(name):
                self.missing[name] = reason
                emit(f"  {name}: {reason}")
            else:
                self.lanes.append(Lane(peer_class(name)(task)))

    def run(self, report: Callable[[], None] = lambda: None) -> None:
        """report: called whenever there are more results."""
        if self.task.workload.together:
            self._together(report)
        else:
            self._apart(report)

    def _together(self, report: Callable[[], None]) -> None:
        for lane in self.lanes:
            self._guarded(lane, self._start)
        for share in _shares(self.task.options.steps, ROUNDS):
            for lane in self.lanes:
                self._guarded(lane, partial(self._timed, count=share))
            report()
        if self.task.options.profile:
            self._guarded(self.lanes[0], self._profile)
        for lane in self.lanes:
            self._drop(lane)

    def _apart(self, report: Callable[[], None]) -> None:
        steps, ours = self.task.options.steps, self.lanes[0]
        once, again = _shares(steps, ROUNDS) if len(self.lanes) > 1 else (steps, 0)
        for lane in self.lanes:
            self._guarded(lane, partial(self._timed, count=once if lane is ours else steps))
            if lane is ours and self.task.options.profile:
                self._guarded(lane, self._profile)
            self._drop(lane)
            report()
        if again and not self._late():
            self._guarded(ours, partial(self._timed, count=again))
            self._drop(ours)

    # --- parts of a turn ---

    def _start(self, lane: Lane) -> None:
        """Build, compare, and the first steps, which compile."""
        began, before = time.perf_counter(), self.gauge.held()
        torch.manual_seed(self.task.options.seed)
        lane.runner.build()
        lane.built = True
        self.gauge.synchronise()
        again = bool(lane.seconds)
        if not again:
            lane.build_s = time.perf_counter() - began
            lane.logits = self._probe(lane)
            lane.trainable = lane.runner.trainable()
        lane.own = self.gauge.held() - before
        others = before
        self.gauge.reset_peak()
        lane.next_step = 0
        numbers = []
        for k in range(max(1, self.task.options.warmup)):
            seconds, one = self.gauge.time_steps(lane.runner.step, lane.next_step, 1)
            lane.next_step += 1
            numbers += one
            if k == 0 and not again:
                lane.first_step_s = seconds[0]
        lane.last_step_s = seconds[0]
        self._book(lane, others)
        if not again:
            lane.first = [each.values() for each in numbers]
            emit(
                f"  {lane.name}: built in {lane.build_s:.1f} s, first step {lane.first_step_s:.1f} s, "
                f"then {1000 * seconds[0]:.1f} ms, loss {lane.first[0]['loss']:.4f}"
            )

    def _probe(self, lane: Lane) -> torch.Tensor | None:
        try:
            return lane.runner.probe_logits().cpu()
        except Exception as error:  # the losses are still compared
            emit(f"  {lane.name}: no logits to compare, {_in_short(error)}")
            return None

    def _settle(self, lane: Lane, ran: float) -> None:
        """Steps that are not counted, until the card has worked long enough for its clocks to be steady.
        ran: seconds that it has just worked already."""
        while ran < self.gauge.settle:
            count = math.ceil((self.gauge.settle - ran) / lane.last_step_s)
            seconds, _ = self.gauge.time_steps(lane.runner.step, lane.next_step, count)
            lane.next_step += count
            lane.last_step_s = statistics.median(seconds)
            ran += sum(seconds)

    def _timed(self, lane: Lane, count: int) -> None:
        begun = lane.built
        if not begun:
            self._start(lane)
        others = self.gauge.held() - lane.own
        self.gauge.reset_peak()
        # Others may have been built since its first steps, a pause for the card; and the very first step compiled.
        paused = begun or self.task.options.warmup < 2
        self._settle(lane, 0.0 if paused else lane.last_step_s)
        first = lane.next_step
        seconds, numbers = self.gauge.time_steps(lane.runner.step, first, count)
        lane.next_step += count
        lane.readings += self.watch.last(sum(seconds))
        lane.seconds += seconds
        if lane.runner.waits:  # the last one's is not known before the next step
            waited = sum(lane.runner.waits.get(number, 0.0) for number in range(first, first + count))
            lane.waited = (lane.waited or 0.0) + waited
        lane.losses += [each.values()["loss"] for each in numbers]
        self._book(lane, others)

    def _book(self, lane: Lane, others: int) -> None:
        lane.peak = max(lane.peak, self.gauge.peak() - others)
        lane.own = self.gauge.held() - others

    def _profile(self, lane: Lane) -> None:
        from erniekit.bench.profile import profile_steps, steps_for

        before, count = steps_for(statistics.median(lane.seconds), self.gauge.card)
        self.profile = profile_steps(lane.runner.step, lane.next_step, before, count, self.task.hardware)
        lane.next_step += before + count

    # --- around it ---

    def _guarded(self, lane: Lane, act: Callable[[Lane], None], again: bool = False) -> None:
        """A failure is a line in the result and the others go on. Out of memory is tried once more, thriftier."""
        if self._late() and not lane.seconds and lane is not self.lanes[0]:
            lane.failed = lane.failed or "no time left"
        if lane.failed:
            return
        try:
            with lane.runner.active():
                act(lane)
            return
        except torch.OutOfMemoryError:
            failed = "out of memory"
        except Exception as error:
            failed = _in_short(error)
            if lane is self.lanes[0]:
                traceback.print_exc()
        # Here the error is freed, and with it what its frames held on to.
        self._drop(lane)
        if failed == "out of memory" and not again and lane.runner.save_memory():
            emit(f"  {lane.name}: out of memory; again with recompute")
            lane.seconds.clear()
            lane.waited = None
            lane.readings.clear()
            lane.peak = 0
            self._guarded(lane, act, again=True)
            return
        lane.failed = failed
        emit(f"  {lane.name}: {failed}")

    def _drop(self, lane: Lane) -> None:
        if lane.built and isinstance(lane.runner, Ours):
            with suppress(Exception):  # of a device that has failed nothing can be read
                self.busiest = lane.runner.busiest()
        held = self.gauge.held()
        lane.runner.close()
        self.gauge.sweep()
        if lane.own > GIB and self.gauge.held() > held - lane.own // 2:
            torch._dynamo.reset()  # compiled code may still hold the model
            self.gauge.sweep()
        lane.built, lane.own = False, 0

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


def _shares(steps: int, rounds: int) -> list[int]:
    """steps in so many parts, the first no smaller than the last."""
    return [(steps + rounds - 1 - k) // rounds for k in range(rounds)]


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
