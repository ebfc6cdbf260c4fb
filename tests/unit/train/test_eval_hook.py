"""Which evaluation was the best, and when to stop for want of a better one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.checkpoint.state import TrainState
from erniekit.errors import ConfigError
from erniekit.track import Trackers
from erniekit.track.base import RunInfo
from erniekit.train.eval_hook import BestRule, EvalHook

NAN, INF = math.nan, math.inf


def best_of(values: list[float], rule: BestRule, state: TrainState | None = None) -> tuple[TrainState, str, list[int]]:
    """The state after these evaluations, why it stopped, and the steps that were kept as the best."""
    trainer: Any = SimpleNamespace(state=state or TrainState(), stop_reason="", phase=lambda name: None)
    left, kept = iter(values), []
    hook = EvalHook(
        lambda go_on: {rule.metric: next(left)},
        Trackers([], RunInfo(Path())),
        1,
        rule,
        lambda trainer: kept.append(trainer.state.step),
    )
    for _ in values:
        trainer.state.step += 1
        hook.after_step(trainer, SimpleNamespace(step=trainer.state.step))  # type: ignore[arg-type]
        if trainer.stop_reason:
            break
    return trainer.state, trainer.stop_reason, kept


@pytest.mark.parametrize("greater", [False, True])
@pytest.mark.parametrize("first", [NAN, INF, -INF])
def test_what_is_not_a_number_is_never_the_best_and_always_beaten(first: float, greater: bool) -> None:
    state, _, kept = best_of([first, 3.0, first, 2.0], BestRule(greater=greater))
    assert (state.best_metric, state.best_step) == ((3.0, 2) if greater else (2.0, 4))
    assert kept == ([2] if greater else [2, 4])


@pytest.mark.parametrize("greater", [False, True])
def test_a_best_that_an_earlier_version_stored_as_nan_is_beaten(greater: bool) -> None:
    state, _, kept = best_of([7.0], BestRule(greater=greater), TrainState(best_metric=NAN, best_step=0))
    assert (state.best_metric, kept) == (7.0, [1])


def test_evaluations_that_are_not_numbers_count_towards_an_early_stop() -> None:
    state, why, kept = best_of([NAN, NAN, 1.0], BestRule(patience=2))
    assert (state.step, state.best_metric, kept) == (2, None, [])
    assert "eval_loss has not improved in 2 evaluations (it never was a number)" in why
    state, why, _ = best_of([1.0, NAN, 2.0, 0.5], BestRule(patience=2))
    assert state.step == 3
    assert "(best 1 at step 1)" in why


def test_a_metric_the_evaluation_does_not_tell_stops_at_the_first_one() -> None:
    trainer: Any = SimpleNamespace(state=TrainState(step=1), stop_reason="", phase=lambda name: None)
    hook = EvalHook(
        lambda go_on: {"eval_loss": 1.0}, Trackers([], RunInfo(Path())), 1, BestRule("eval_los", patience=3)
    )
    with pytest.raises(ConfigError, match="eval_los; the evaluation reports eval_loss") as caught:
        hook.on_end(trainer)
    assert caught.value.fix == "did you mean eval_loss?"
