"""Decisions of all ranks with one rank alone; with several they are in tests/distributed/test_guards.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from erniekit.train.agreement import Agreed, StepAgreement, agree_on_stop, agree_on_stop_or_save, decide_finite


class Others:
    """This rank and what the others would have put into the next reduction."""

    rank = 0

    def __init__(self, *others: float) -> None:
        self.others, self.calls = list(others), 0

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def max(self, value: int) -> int:
        self.calls += 1
        return int(max([value, *self.others]))

    def sum(self, value: float) -> float:
        self.calls += 1
        return sum([value, *self.others])

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_no_number_is_enough(bad: float) -> None:
    assert decide_finite([1.0, 0.0], Others())
    assert not decide_finite([1.0, bad], Others())
    assert not decide_finite([1.0], Others(0, 1)), "another rank's"


def test_any_ranks_signal_is_everyones() -> None:
    assert agree_on_stop(None, Others()) is None
    assert agree_on_stop("SIGUSR1", Others()) == "SIGUSR1"
    assert agree_on_stop(None, Others(0, 2)) == "SIGINT"
    assert agree_on_stop("SIGINT", Others(15)) == "SIGTERM"


def test_a_stop_and_a_save_by_time_are_agreed_on_together() -> None:
    assert agree_on_stop_or_save(None, False, Others()) == (None, False)
    assert agree_on_stop_or_save(None, True, Others(0)) == (None, True)
    assert agree_on_stop_or_save(None, False, Others(1)) == (None, True)
    assert agree_on_stop_or_save("SIGTERM", False, Others(1))[0] == "SIGTERM"
    assert agree_on_stop_or_save(None, True, Others(2 * 15))[0] == "SIGTERM"
    world = Others(0, 0)
    agree_on_stop_or_save(None, True, world)
    assert world.calls == 1


def test_a_step_is_agreed_on_in_one_reduction() -> None:
    world = Others(0, 0, 0)
    assert StepAgreement(world)([1.0], None) == Agreed(True, None)
    assert world.calls == 1


def test_the_two_answers_do_not_mix_however_many_ranks_there_are() -> None:
    base = 5001  # 5000 ranks, each with a bad value and a signal
    world = Others(*[1.0 + base] * 4999)
    world.max = lambda value: 15  # type: ignore[method-assign]
    assert StepAgreement(world)([math.nan], "SIGTERM") == Agreed(False, "SIGTERM")
    world = Others(*[1.0] * 4999)
    assert StepAgreement(world)([1.0], None) == Agreed(False, None)
    world = Others(*[float(base)] * 4999)
    world.max = lambda value: 15  # type: ignore[method-assign]
    assert StepAgreement(world)([1.0], None) == Agreed(True, "SIGTERM")
