"""The bias that evens out the experts: how it moves, when it does not, and what is told of the loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.parallel.sharding import Box
from erniekit.train.expert_balance import ExpertBalance
from erniekit.train.step import Launched, StepResult

WHOLE = (Box((slice(0, 4),), (slice(0, 4),)),)
APPLIED, SKIPPED = 2.0, float("nan")  # a step's loss


def engine(**usage: list[int]) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), usage={int(k[1:]): torch.tensor(v) for k, v in usage.items()})


def hook(made: Any, step: float = 0.001, **biases: torch.Tensor) -> ExpertBalance:
    pieces = {int(k[1:]): (v, WHOLE) for k, v in biases.items()}
    return ExpertBalance(made, [1, 3], (4,), None, step, pieces)


def take(balance: ExpertBalance, loss: float) -> None:
    """One step of the loop, as far as the hook sees it."""
    told = torch.tensor([loss, 1.0])
    good = told.isfinite().all().float()
    step = Launched(told, good, lambda values: StepResult(1, *values, 1e-3, 1, 1, 1, bool(good)))
    balance.launched(None, step)  # type: ignore[arg-type]
    step.send()
    balance.after_step(None, step.result())  # type: ignore[arg-type]


def test_busy_experts_go_down_idle_ones_up_and_those_at_the_mean_stay() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    take(hook(engine(_1=[10, 4, 2, 0]), _1=bias), APPLIED)
    assert bias.tolist() == pytest.approx([0.499, 0.0, 0.001, -0.499])


def test_a_skipped_step_moves_nothing_and_its_choices_are_forgotten() -> None:
    bias = torch.zeros(4)
    made = engine(_1=[10, 4, 2, 0])
    balance = hook(made, _1=bias)
    take(balance, SKIPPED)
    assert made.usage == {}
    take(balance, APPLIED)
    assert bias.tolist() == [0.0] * 4


def test_choices_of_a_step_that_is_rolled_back_are_forgotten() -> None:
    made = engine(_1=[10, 4, 2, 0])
    hook(made).phase("restore")
    assert made.usage == {}


def test_a_rank_moves_only_the_slice_it_holds() -> None:
    held = torch.zeros(2)
    box = Box((slice(2, 4),), (slice(0, 2),))
    balance = ExpertBalance(engine(_3=[9, 0, 9, 0]), [1, 3], (4,), None, 0.5, {3: (held, (box,))})
    take(balance, APPLIED)
    assert held.tolist() == [-0.5, 0.5]


def test_without_a_step_only_loads_are_told() -> None:
    bias = torch.zeros(4)
    balance = hook(engine(_1=[8, 4, 4, 0], _3=[1, 1, 1, 1]), step=0.0, _1=bias)
    take(balance, APPLIED)
    assert bias.tolist() == [0.0] * 4
    assert balance.metrics() == {"moe_load": 2.0, "moe_dead_experts": 1.0}


def test_loads_are_told_of_all_steps_since_the_last_record() -> None:
    made = engine(_1=[8, 0, 0, 0], _3=[2, 2, 2, 2])
    balance = hook(made)
    take(balance, APPLIED)
    made.usage = {1: torch.tensor([0, 8, 8, 8]), 3: torch.tensor([2, 2, 2, 2])}
    take(balance, APPLIED)
    assert balance.metrics() == {"moe_load": 1.0, "moe_dead_experts": 0.0}
    made.usage = {1: torch.tensor([1, 0, 0, 0]), 3: torch.tensor([1, 1, 1, 1])}
    take(balance, APPLIED)
    assert balance.metrics() == {"moe_load": 4.0, "moe_dead_experts": 3.0}


def test_each_modality_is_evened_out_by_itself_and_one_without_tokens_says_nothing() -> None:
    bias = torch.zeros(2, 4)
    whole = (Box((slice(0, 2), slice(0, 4)), (slice(0, 2), slice(0, 4))),)
    text, vision = [10, 4, 2, 0], [0, 0, 0, 0]
    balance = ExpertBalance(engine(_1=[text, vision]), [1], (2, 4), None, 0.5, {1: (bias, whole)})
    take(balance, APPLIED)
    assert bias.tolist() == [[-0.5, 0.0, 0.5, 0.5], [0.0] * 4]
    assert balance.metrics() == {"moe_load": 2.5, "moe_dead_experts": 1.0, "moe_load_text": 2.5}
