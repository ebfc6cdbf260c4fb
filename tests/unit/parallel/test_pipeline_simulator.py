"""The simulator: it finds lists that never end, and says which rank waits for what."""

from __future__ import annotations

import pytest

from erniekit.parallel.pipeline_actions import (
    BACKWARD,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Order,
)
from erniekit.parallel.pipeline_schedule import schedule
from erniekit.parallel.pipeline_simulator import ScheduleStops, simulate
from erniekit.parallel.pipeline_timeline import as_svg, as_text


def order(*words: tuple[str, int]) -> Order:
    """Of one rank of two, whose stage is the rank: (kind, micro-batch)."""
    stage = 0 if any(kind in (SEND_ACTIVATION, RECEIVE_GRADIENT) for kind, _ in words) else 1
    return tuple(Action(kind, stage, m) for kind, m in words)


# Each sends first and then receives: what 1F1B does in its steady state when sends are taken to be buffered.
BOTH_SEND_FIRST = (
    order((FORWARD, 0), (SEND_ACTIVATION, 0), (FORWARD, 1), (SEND_ACTIVATION, 1), (RECEIVE_GRADIENT, 0), (BACKWARD, 0),
          (RECEIVE_GRADIENT, 1), (BACKWARD, 1)),
    order((RECEIVE_ACTIVATION, 0), (FORWARD, 0), (BACKWARD, 0), (SEND_GRADIENT, 0), (RECEIVE_ACTIVATION, 1),
          (FORWARD, 1), (BACKWARD, 1), (SEND_GRADIENT, 1)),
)  # fmt: skip


def test_two_ranks_that_both_send_first_are_found_and_named() -> None:
    with pytest.raises(ScheduleStops) as found:
        simulate(BOTH_SEND_FIRST, blocking=True)
    assert "rank 0 at send activation of stage 0, micro-batch 1" in str(found.value)
    assert "rank 1 at send gradient of stage 1, micro-batch 0" in str(found.value)
    assert simulate(BOTH_SEND_FIRST).seconds > 0, "with buffers it would end"


def test_a_send_that_nobody_receives_is_found() -> None:
    first, second = schedule("1f1b", 2, 1, 2)
    without = tuple(a for a in second if a != Action(RECEIVE_ACTIVATION, 1, 1))
    with pytest.raises(ScheduleStops, match="send activation of stage 0, micro-batch 1"):
        simulate((first, without), blocking=True)


def test_what_is_sent_before_it_is_computed_is_found() -> None:
    first, second = schedule("1f1b", 2, 1, 1)
    moved = tuple(sorted(first, key=lambda a: a.kind != SEND_ACTIVATION))
    with pytest.raises(ScheduleStops, match="before it is computed"):
        simulate((moved, second), blocking=True)


def test_a_transfer_takes_both_ranks_where_it_blocks_and_delays_the_receiver_where_it_does_not() -> None:
    orders = schedule("1f1b", 2, 1, 1)
    assert simulate(orders, transfer=0.5).seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    blocked = simulate(orders, transfer=0.5, blocking=True)
    assert blocked.seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert [span.action.kind for span in blocked.ranks[0]] == [
        FORWARD, SEND_ACTIVATION, RECEIVE_GRADIENT, BACKWARD
    ]  # fmt: skip


def test_the_slowest_stage_is_waited_for() -> None:
    orders = schedule("1f1b", 2, 1, 8)
    even, uneven = simulate(orders), simulate(orders, lambda a: (1.0 + a.stage) * (1 if a.kind == FORWARD else 2))
    assert uneven.seconds >= 8 * 6.0 > even.seconds
    assert uneven.busy(1) == 48.0
    assert uneven.bubble == pytest.approx(1 - 48.0 / uneven.seconds)


def test_a_timeline_is_drawn_with_a_row_for_each_rank_and_dots_where_it_waits() -> None:
    timeline = simulate(schedule("1f1b", 2, 1, 2))  # nine ticks: the first rank waits for two of them
    *rows, told = as_text(timeline, 9 * 5 + 10)
    assert [row.split()[2] for row in rows] == [
        "FFFFF" + "fffff" + "....." * 2 + "B" * 10 + "....." + "b" * 10,
        "....." + "FFFFF" + "B" * 10 + "fffff" + "b" * 10 + "....." * 2,
    ]
    assert "a step 9 s" in told
    assert "waits 33%" in told
    svg = as_svg(timeline)
    assert svg.count("<rect") == 8
    assert "backward of stage 1, micro-batch 0: 2 to 4 s" in svg
    assert svg.rstrip().endswith("</svg>")
