"""Layouts that train are found to be without fault: each on tensors without memory, all of its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.parallel.layout import Layout
from erniekit.rehearse.calls import RankGroup
from erniekit.rehearse.ranks import Parts, everyone, kinds
from support.layouts import EXPERT_LAYOUTS, LAYOUTS
from support.tiny_step import faults, recorded, step, told

OFTEN = ("tp2 x cp2", "pp2 interleaved")
EXPERTS_OFTEN = ("tp2 x dp2, experts over all",)


def named(names: Any, often: tuple[str, ...]) -> list[Any]:
    return [n if n in often else pytest.param(n, marks=pytest.mark.full) for n in names]


def fewest_layers(layout: Layout) -> int:
    """Every layer is seconds of torch's tensors without memory: one without and one with experts, or one a stage."""
    return 2 if layout.pp == 1 else 4


@pytest.mark.parametrize("name", named(LAYOUTS, OFTEN))
def test_a_layout_that_trains_has_no_fault(name: str):
    layout = Layout(**LAYOUTS[name])
    micro = max(2, layout.pp)
    traces = recorded(layout.size, lambda rank: step(layout, rank, micro, fewest_layers(layout)), shapes=True)
    assert min(len(trace.calls) for trace in traces.values()) > 2
    assert told(traces) == ""


@pytest.mark.parametrize("name", named(EXPERT_LAYOUTS, EXPERTS_OFTEN))
def test_a_layout_of_experts_that_trains_has_no_fault(name: str):
    axes, dispatch = EXPERT_LAYOUTS[name]
    layout = Layout(**axes)
    keys: dict[str, Any] = dict(layers=fewest_layers(layout), experts=8, dispatch=dispatch, recompute="full")
    traces = recorded(layout.size, lambda rank: step(layout, rank, **keys), shapes=True)
    assert min(len(trace.calls) for trace in traces.values()) > 2
    assert told(traces) == ""


@pytest.mark.full
@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_recompute_and_the_zero_bubble_schedule_have_no_fault(granularity: str):
    layout = Layout(pp=2, tp=2, virtual_stages=2)
    run = lambda rank: step(layout, rank, recompute=granularity, schedule="zero_bubble")  # noqa: E731
    assert told(recorded(4, run, shapes=True)) == ""


def test_shapes_alone_record_what_real_tensors_do():
    layout = Layout(tp=2, sequence_parallel=True)
    real, shapes = (recorded(2, lambda rank: step(layout, rank, layers=2), shapes=only) for only in (False, True))
    for rank in real:
        assert real[rank].calls == shapes[rank].calls
        assert real[rank].events == shapes[rank].events


def test_one_rank_of_each_kind_stands_for_all():
    """What the first of a kind recorded, told as another's, is what that one records itself."""
    layout = Layout(pp=2, tp=2, dp=2, sequence_parallel=True)
    alike = kinds(layout, lambda rank: None)
    assert sorted(map(len, alike)) == [2, 2, 2, 2]
    run = lambda rank: step(layout, rank)  # noqa: E731
    every = recorded(layout.size, run)
    made = everyone(layout, {group[0]: every[group[0]] for group in alike}, alike)
    for rank in range(layout.size):
        assert made[rank].calls == every[rank].calls
    assert not faults(made)


def test_ranks_that_hold_other_shapes_are_another_kind():
    layout = Layout(fsdp=4)
    assert kinds(layout, lambda rank: rank == 3) == [[0, 1, 2], [3]]


def test_where_all_are_alike_two_are_recorded():
    assert kinds(Layout(dp=4), lambda rank: None) == [[0, 1, 2], [3]]
    assert kinds(Layout(), lambda rank: None) == [[0]]


def test_a_groups_counterpart_is_found_for_every_way_of_parting():
    layout = Layout(pp=4, dp=4, tp=2, experts="data", ep=2)
    parts = Parts(layout)
    assert parts.with_rank(RankGroup((0, 1), 1), 7) == RankGroup((6, 7), 1)  # tensor-parallel neighbours
    assert parts.with_rank(RankGroup((0, 8, 16, 24)), 11).members == (3, 11, 19, 27)  # a pipeline
    assert parts.with_rank(RankGroup((0, 24)), 25).members == (1, 25)  # its ends
    assert parts.with_rank(RankGroup((0, 2)), 13).members == (13, 15)  # ranks that hold all experts once
    assert parts.with_rank(RankGroup((0, 4)), 3).members == (3, 7)  # copies of the same experts
    with pytest.raises(LookupError):
        parts.with_rank(RankGroup((0, 5)), 1)
