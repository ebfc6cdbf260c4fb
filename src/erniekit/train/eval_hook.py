"""Evaluation during training: when it happens, which one was best, and when to stop early. Hooked in by recipes/."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from erniekit.errors import ConfigError
from erniekit.registry import nearest
from erniekit.track import Trackers
from erniekit.train.hooks import Hook
from erniekit.train.step import StepResult

if TYPE_CHECKING:
    from erniekit.train.trainer import Trainer


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
    def __init__(
        self,
        run: Callable[[], dict[str, float]],
        trackers: Trackers,
        every: int,
        rule: BestRule,
        on_best: Callable[[Trainer], None] | None = None,
        at_end: bool = True,
    ) -> None:
        """`run` evaluates now; `on_best` saves a checkpoint that rotation spares. every 0: only at the end."""
        self.run, self.trackers, self.every, self.rule = run, trackers, every, rule
        self.on_best, self.at_end = on_best, at_end
        self.last: dict[str, float] = {}
        self._last_step = -1

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self.waits_for(trainer, result.step):
            self._evaluate(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self.at_end and self._last_step != trainer.state.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        state, rule = trainer.state, self.rule
        trainer.phase("eval")
        self.trackers.status("evaluating")
        self.last, self._last_step = self.run(), state.step
        self.trackers.status("")
        trainer.phase("hooks")
        self.trackers.log(state.step, self.last, "eval")
        if rule.metric not in self.last:
            near = nearest(rule.metric, list(self.last))
            raise ConfigError(
                f"metric_for_best_model is {rule.metric}; the evaluation told {', '.join(self.last)}",
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
            trainer.stop_reason = (
                f"early stop: {rule.metric} has not improved in {state.evals_without_gain} evaluations ({best})"
            )
            self.trackers.event(state.step, "stop", trainer.stop_reason)
