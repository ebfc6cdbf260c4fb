"""Printed while training: one bar on a terminal, one plain line a logged step elsewhere. Always on."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from erniekit.log import emit, paint
from erniekit.track.base import Kind, RunInfo, Tracker
from erniekit.track.progress import Progress
from erniekit.track.units import duration, metric_text

SHOWN_ELSEWHERE = (
    "start",
    "eval",
    "end",
    "signal",
    "not saved",
)  # events with a line, a block or a warning of their own
# In metrics.jsonl and the trackers, but not worth a person's line at every step.
QUIET = (
    "ppl",
    "router_z",
    "router_ortho",
    "trained_tokens_per_second",
    "current_memory_allocated",
    "current_memory_reserved",
    "max_memory_reserved",
    "interval_samples_per_second",
    "interval_steps_per_second",
    "progress_or_epoch",
    "eval_tokens",
    "eval_samples_per_second",
    "eval_steps_per_second",
)
FIRST = ("loss", "eval_loss", "train_loss", "learning_rate")  # ERNIEKit's lines open with these, then global_step


class ConsoleTracker(Tracker):
    name = "console"

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._start_step = self._total = 0
        self._counted_from = (0, 0.0)  # step and time

    def start(self, run: RunInfo) -> None:
        self._start_step, self._total = run.start_step, run.total_steps
        self._counted_from = (run.start_step, time.monotonic())
        if not run.disable_tqdm and sys.stderr.isatty():
            self._bar = Progress(run.total_steps, run.start_step)

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.advance(step)

    def status(self, text: str) -> None:
        if self._bar:
            self._bar.status(text)

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        if self._bar and kind == "train":
            self._bar.advance(step)
            self._bar.show(metrics)
            return
        if kind == "end":
            self._close_bar()
            return  # the recipe prints the end of the run
        line = metrics_line(step, metrics)
        emit(f"{line}, eta: {self._eta(step)}" if kind == "train" and step < self._total else line)

    def event(self, step: int, name: str, text: str) -> None:
        if name not in SHOWN_ELSEWHERE:
            emit(f"{paint(f'step {step}', 'dim')} {name}: {text}" if text else f"step {step} {name}")

    def close(self) -> None:
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None

    def _eta(self, step: int) -> str:
        """By the steps since the first that was logged: what comes once (compilation, recording) is before it."""
        now, (first, began) = time.monotonic(), self._counted_from
        if first == self._start_step or step <= first:  # a run may go back to an earlier step
            self._counted_from = (step, now)
        return duration((now - began) / max(1, step - first) * (self._total - step))


def metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    """`loss: 2.315300, learning_rate: 0.0001, global_step: 10, ...`, the form ERNIEKit prints."""
    parts = [f"{name}: {metric_text(name, metrics[name])}" for name in FIRST if name in metrics]
    parts.append(f"global_step: {step}")
    rest = (name for name in metrics if name not in FIRST and name not in QUIET)
    parts += [f"{name}: {metric_text(name, metrics[name])}" for name in rest]
    return ", ".join(parts)
