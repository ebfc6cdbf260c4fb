"""The order of a pipeline's work against torch's own lists, and the clock of its replay."""

from __future__ import annotations

import pytest

from erniekit.planner.schedule import actions, most_in_flight, replay, step_seconds, warm_up


def counted(ranks: int, each: int, micro_batches: int, rank: int) -> int:
    held = most = 0
    for action in actions(ranks, each, micro_batches, rank):
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    assert held == 0
    return most


@pytest.mark.parametrize(
    ("ranks", "each", "m"), [(1, 1, 3), (4, 1, 8), (4, 1, 3), (4, 1, 4), (4, 2, 8), (2, 3, 4), (4, 2, 4), (3, 4, 9)]
)
def test_every_action_is_done_once_and_as_many_are_under_way_as_said(ranks: int, each: int, m: int) -> None:
    for rank in range(ranks):
        todo = actions(ranks, each, m, rank)
        assert len(todo) == len(set(todo)) == 2 * each * m
        assert {a.stage for a in todo} == {s * ranks + rank for s in range(each)}
        assert counted(ranks, each, m, rank) == warm_up(ranks, each, m, rank)
        assert most_in_flight(ranks, each, m, rank) == warm_up(ranks, each, m, rank) / each
    assert replay(ranks, each, m, [1.0] * ranks * each, [2.0] * ranks * each) >= 3.0 * m * each


def test_interleaved_lists_are_torchs() -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    class Stages(ScheduleInterleaved1F1B):
        """The list alone: no stage has to be there for it."""

        def __init__(self, ranks: int, each: int, m: int) -> None:
            self.pp_group_size, self.n_local_stages, self._n_microbatches = ranks, each, m
            self.number_of_rounds = max(1, m // ranks)
            self.microbatches_per_round = m // self.number_of_rounds
            self.rank, self.zero_bubble = 0, False

    for ranks, each, m in ((2, 2, 4), (4, 2, 8), (4, 3, 12)):
        for rank in range(ranks):
            theirs = Stages(ranks, each, m)._calculate_single_rank_operations(rank)
            named = [("F" if a.computation_type.name == "FORWARD" else "B", a) for a in theirs if a is not None]
            order = [(kind, a.stage_index, a.microbatch_index) for kind, a in named]
            assert order == [tuple(a) for a in actions(ranks, each, m, rank)]


def test_a_pipeline_of_equal_stages_waits_as_the_formula_says() -> None:
    ranks, m, f, b = 4, 8, 1.0, 2.0
    assert replay(ranks, 1, m, [f] * ranks, [b] * ranks) == pytest.approx((m + ranks - 1) * (f + b))
    interleaved = replay(ranks, 2, m, [f / 2] * 8, [b / 2] * 8)
    assert m * (f + b) < interleaved < (m + ranks - 1) * (f + b), "it waits less"


def test_the_slowest_stage_and_slow_links_are_waited_for() -> None:
    even = replay(2, 1, 8, [1.0, 1.0], [2.0, 2.0])
    assert replay(2, 1, 8, [1.0, 2.0], [2.0, 4.0]) >= 8 * 6.0
    assert replay(2, 1, 8, [1.0, 1.0], [2.0, 2.0], send=0.5) > even


@pytest.mark.parametrize(("ranks", "each"), [(4, 1), (4, 2)])
def test_replaying_a_part_gives_the_seconds_of_the_whole(ranks: int, each: int) -> None:
    forward, backward = ([x + 0.1 * s for s in range(ranks * each)] for x in (1.0, 2.0))
    m = 10 * ranks
    whole = replay(ranks, each, m, forward, backward, 0.05)
    assert step_seconds(ranks, each, m, forward, backward, 0.05) == pytest.approx(whole, rel=0.02)
