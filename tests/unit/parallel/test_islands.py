"""Which groups islands may form, and the refusals before ranks hang in one that cannot be."""

from __future__ import annotations

import pytest

from erniekit.errors import PlanError
from erniekit.parallel.islands import ACROSS, Islands, check_islands
from erniekit.parallel.layout import Layout

CARDS = Islands(("gpu",) * 8 + ("iluvatar_gpu",) * 8, ("cpu:gloo,cuda:nccl",) * 16)


def test_a_group_within_an_island_uses_its_own_library_and_one_across_the_host() -> None:
    assert CARDS.backend(range(8, 16)) == "cpu:gloo,cuda:nccl"
    assert CARDS.backend((0, 8)) == ACROSS == "gloo"
    assert CARDS.describe() == "gpu: ranks 0 to 7, iluvatar_gpu: ranks 8 to 15"
    assert CARDS.stage_interconnects(Layout(pp=4, tp=4)) == ["gpu", "gpu", "iluvatar_gpu", "iluvatar_gpu"]


def test_a_stage_on_two_kinds_of_device_is_refused_with_both_names() -> None:
    check_islands(CARDS, Layout(pp=2, tp=8))
    check_islands(CARDS, Layout(pp=4, tp=2, dp=2))
    for layout in (Layout(tp=16), Layout(dp=16), Layout(pp=1, tp=8, dp=2)):
        with pytest.raises(PlanError, match="gpu and iluvatar_gpu"):
            check_islands(CARDS, layout)
    uneven = Islands(("gpu",) * 2 + ("iluvatar_gpu",) * 6, ("gloo",) * 8)
    with pytest.raises(PlanError, match=r"stage 0 .*\(ranks 0 to 3\)"):
        check_islands(uneven, Layout(pp=2, tp=4))
    check_islands(uneven, Layout(pp=4, tp=2))


def test_an_island_in_two_pieces_and_sharded_weights_are_refused() -> None:
    pieces = Islands(("gpu", "npu", "gpu"), ("gloo",) * 3)
    with pytest.raises(PlanError, match="several pieces"):
        check_islands(pieces, Layout(pp=3))
    with pytest.raises(PlanError, match="sharded weights"):
        check_islands(CARDS, Layout(pp=2, fsdp=8))
