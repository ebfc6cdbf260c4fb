"""Evaluation during training: when it happens, which one was best, and when to stop early. Hooked in by recipes/."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World
from erniekit.printable import counted
from erniekit.registry import nearest
from erniekit.track import Trackers
from erniekit.train.agreement import HostGroup, agree_on_stop
from erniekit.train.evaluate import Abandoned, GoOn
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.step import StepResult


@dataclass(frozen=True)
class BestRule:
    """What `better` means, and how long to wait for it. patience 0: never stop early."""

    metric: str = "eval_loss"
    greater: bool = False
    patience: int = 0
    threshold: float = 0.0

    def better(self, new: float, old: float | None) -> bool:
        """What is not a number is never better, and anything is better than that."""
        if not math.isfinite(new):
            return False
        if old is None or not math.isfinite(old):
            return True
        gain = new - old if self.greater else old - new
        return gain > self.threshold


class EvalHook(Hook):
    """Behind the hook that saves: a step that is both saved and evaluated is safe before a long evaluation begins."""

    def __init__(
        self,
        run: Callable[[GoOn], dict[str, float]],
        trackers: Trackers,
        every: int,
        rule: BestRule,
        on_best: Callable[[TrainingLoop], None] | None = None,
        at_end: bool = True,
        leave: Callable[[TrainingLoop, str], NoReturn] | None = None,
        world: HostGroup | None = None,
        generate: Callable[[int], dict[str, float]] | None = None,
    ) -> None:
        """`run(go_on)` evaluates now and calls `go_on` before each batch; `on_best` saves a checkpoint that rotation
        spares. every 0: only at the end. leave: called for a signal during an evaluation; None: signals wait until
        the step after. generate: called with the step after `run`, for metrics of generated answers."""
        self.run, self.trackers, self.every, self.rule = run, trackers, every, rule
        self.on_best, self.at_end = on_best, at_end
        self.leave, self.world = leave, world or World()
        self.generate = generate
        self.last: dict[str, float] = {}
        self._last_step = -1

    def on_start(self, trainer: TrainingLoop) -> None:
        """A checkpoint is written before its step is evaluated, so a run that goes on from it does that first."""
        step = trainer.state.step
        if step and self.waits_for(trainer, step) and trainer.state.evaluated_step != step:
            self._evaluate(trainer)

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        if self.waits_for(trainer, result.step):
            self._evaluate(trainer)

    def on_end(self, trainer: TrainingLoop) -> None:
        if self.at_end and self._last_step != trainer.state.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: TrainingLoop) -> None:
        state, rule = trainer.state, self.rule
        stop_signal: str | None = None

        def go_on() -> bool:
            nonlocal stop_signal
            stop_signal = agree_on_stop(trainer.signals.requested, self.world) if self.leave else None
            return stop_signal is None

        trainer.phase("eval")
        self.trackers.status("evaluating")
        try:
            self.last = self.run(go_on)
            if self.generate is not None:
                self.last |= self.generate(state.step)
        except Abandoned:
            assert stop_signal is not None
            assert self.leave is not None
            self.leave(trainer, stop_signal)
        finally:
            self.trackers.status("")
        self._last_step = state.evaluated_step = state.step
        trainer.phase("hooks")
        self.trackers.log(state.step, self.last, "eval")
        if rule.metric not in self.last:
            near = nearest(rule.metric, list(self.last))
            raise ConfigError(
                f"metric_for_best_model is {rule.metric}; the evaluation reports {', '.join(self.last)}",
                where="metric_for_best_model",
                fix=f"did you mean {near[0]}?" if near else "use one of those",
            )
        value = self.last[rule.metric]
        if rule.better(value, state.best_metric):
            state.best_metric, state.best_step, state.evals_without_gain = value, state.step, 0
            self.trackers.event(state.step, "best", f"{rule.metric} {value:.6g}")
            if self.on_best:
                self.on_best(trainer)
            return
        state.evals_without_gain += 1
        if rule.patience and state.evals_without_gain >= rule.patience:
            best = "it never was a number"
            if state.best_metric is not None:
                best = f"best {state.best_metric:.6g} at step {state.best_step}"
            past = counted(state.evals_without_gain, "evaluation")
            trainer.stop_reason = f"early stop: {rule.metric} has not improved in {past} ({best})"
            self.trackers.event(state.step, "stop", trainer.stop_reason)
