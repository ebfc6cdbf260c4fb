"""The clock of a pipeline's replay."""

from __future__ import annotations

import pytest

from erniekit.planner.schedule import StageTimes, replay, step_seconds


def seconds(ranks: int, each: int, m: int, forward: float, backward: float, send: float = 0.0) -> float:
    count = ranks * each
    return replay("auto", ranks, each, m, StageTimes((forward,) * count, (backward,) * count, send)).seconds


def test_a_pipeline_of_equal_stages_waits_as_the_formula_says() -> None:
    ranks, m, f, b = 4, 8, 1.0, 2.0
    assert seconds(ranks, 1, m, f, b) == pytest.approx((m + ranks - 1) * (f + b))
    interleaved = seconds(ranks, 2, m, f / 2, b / 2)
    assert m * (f + b) < interleaved < (m + ranks - 1) * (f + b), "it waits less"


def test_zero_bubble_counts_a_backward_pass_in_two_halves() -> None:
    times = StageTimes((1.0,) * 4, (2.0,) * 4)
    found = replay("zero_bubble", 4, 1, 8, times)
    assert [found.busy(rank) for rank in range(4)] == [24.0] * 4
    assert found.seconds < replay("1f1b", 4, 1, 8, times).seconds


def test_the_slowest_stage_and_slow_links_are_waited_for() -> None:
    even = seconds(2, 1, 8, 1.0, 2.0)
    assert replay("auto", 2, 1, 8, StageTimes((1.0, 2.0), (2.0, 4.0))).seconds >= 8 * 6.0
    assert seconds(2, 1, 8, 1.0, 2.0, send=0.5) > even


@pytest.mark.parametrize(("ranks", "each"), [(4, 1), (4, 2)])
def test_replaying_a_part_gives_the_seconds_of_the_whole(ranks: int, each: int) -> None:
    forward, backward = (tuple(x + 0.1 * s for s in range(ranks * each)) for x in (1.0, 2.0))
    m, times = 10 * ranks, StageTimes(forward, backward, 0.05)
    whole = replay("auto", ranks, each, m, times).seconds
    assert step_seconds("auto", ranks, each, m, times) == pytest.approx(whole, rel=0.02)
