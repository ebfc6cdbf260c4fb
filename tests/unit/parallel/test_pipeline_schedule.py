"""Action lists: every one ends also where each send waits for its receive, and does each thing once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from erniekit.parallel.pipeline_actions import (
    BACKWARD,
    COMPUTED,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WEIGHT,
    Action,
    most_in_flight,
    warm_up,
)
from erniekit.parallel.pipeline_schedule import computations, resolved, schedule
from erniekit.parallel.pipeline_simulator import Span, simulate

ONE_STAGE = [(name, ranks, 1, m) for name in ("gpipe", "1f1b", "zero_bubble") for ranks in (1, 2, 4) for m in (1, 3, 8)]
SEVERAL = [
    (name, ranks, each, m)
    for name in ("interleaved", "zero_bubble")
    for ranks, each, m in ((2, 2, 2), (2, 3, 4), (4, 2, 8), (3, 4, 9))
]


@pytest.mark.parametrize(("name", "ranks", "each", "m"), [*ONE_STAGE, *SEVERAL])
def test_a_list_does_everything_once_and_ends_where_every_send_waits(name: str, ranks: int, each: int, m: int) -> None:
    orders = schedule(name, ranks, each, m)
    simulate(orders, blocking=True)
    last = ranks * each - 1
    seen = Counter(action for order in orders for action in order)
    assert set(seen.values()) == {1}
    for stage in range(last + 1):
        for b in range(m):
            done = {kind for kind in COMPUTED if Action(kind, stage, b) in seen}
            assert done in ({FORWARD, BACKWARD}, {FORWARD, INPUT, WEIGHT})
            crosses = ranks > 1
            assert (Action(SEND_ACTIVATION, stage, b) in seen) == (crosses and stage < last)
            assert (Action(RECEIVE_ACTIVATION, stage, b) in seen) == (crosses and stage > 0)
            assert (Action(SEND_GRADIENT, stage, b) in seen) == (crosses and stage > 0)
            assert (Action(RECEIVE_GRADIENT, stage, b) in seen) == (crosses and stage < last)
    for rank, order in enumerate(orders):
        assert {action.stage % ranks for action in order} == {rank}


def most_held(spans: Sequence[Span]) -> int:
    """Forward passes whose activations a rank holds at once."""
    held = most = 0
    split = any(span.action.kind == WEIGHT for span in spans)
    whole = {span.action[1:] for span in spans if span.action.kind == BACKWARD}
    for span in spans:
        kind, *of = span.action
        freed = kind == BACKWARD or (kind == WEIGHT if split and tuple(of) not in whole else kind == INPUT)
        held += (kind == FORWARD) - freed
        most = max(most, held)
    return most


@pytest.mark.parametrize(("name", "ranks", "each", "m"), [("1f1b", 4, 1, 8), ("1f1b", 4, 1, 3), *SEVERAL])
def test_no_more_is_held_than_the_planner_counts(name: str, ranks: int, each: int, m: int) -> None:
    timeline = simulate(schedule(name, ranks, each, m))
    for rank in range(ranks):
        assert most_held(timeline.ranks[rank]) <= warm_up(ranks, each, m, rank)
        assert most_in_flight(ranks, each, m, rank) == warm_up(ranks, each, m, rank) / each
        if name != "zero_bubble":
            assert most_held(timeline.ranks[rank]) == warm_up(ranks, each, m, rank)


def test_zero_bubble_waits_less_than_the_same_order_with_backward_in_one() -> None:
    for ranks, each, m in ((4, 1, 8), (4, 2, 8)):
        plain = simulate(schedule("auto", ranks, each, m))
        assert simulate(schedule("zero_bubble", ranks, each, m)).seconds < plain.seconds


def test_blocking_costs_1f1b_nothing_where_stages_are_even() -> None:
    orders = schedule("1f1b", 4, 1, 8)
    assert simulate(orders, blocking=True).seconds == simulate(orders).seconds == (8 + 3) * 3


def test_auto_is_1f1b_and_interleaved_where_ranks_hold_several_stages() -> None:
    assert resolved("auto", 1) == resolved("1f1b", 1) == "1f1b"
    assert resolved("auto", 2) == resolved("gpipe", 2) == "interleaved"
    assert resolved("zero_bubble", 1) == "zero_bubble"


def test_interleaved_computations_are_torchs() -> None:
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
            named = [
                (FORWARD if a.computation_type.name == "FORWARD" else BACKWARD, a) for a in theirs if a is not None
            ]
            order = [(kind, a.stage_index, a.microbatch_index) for kind, a in named]
            assert order == [tuple(a) for a in computations("interleaved", ranks, each, m)[rank]]
