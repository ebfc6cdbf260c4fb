"""What ranks try before the first step: right collectives pass in every layout, a wrong one is refused on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from erniekit.devices import pick
from erniekit.errors import DeviceError
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.self_test import check_collectives
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
LAYOUTS = {
    "dp2": Layout(dp=2),
    "sp2": Layout(tp=2, sequence_parallel=True),
    "cp2": Layout(cp=2),
    "pp2": Layout(pp=2),
    "ep2": Layout(dp=2, experts="data"),
    "stage 1": Layout(fsdp=2),
    "stage 3": Layout(fsdp=2, sharding_stage=3),
}
LARGER = {
    "pp3": Layout(pp=3),
    "dp2 x fsdp2": Layout(dp=2, fsdp=2),
    "fsdp2 x cp2": Layout(fsdp=2, cp=2, sharding_stage=3),
    "tp2 x pp2": Layout(tp=2, pp=2),
}


def checked(layout: Layout) -> str:
    world = World(layout, dist.get_rank())
    try:
        check_collectives(world, pick("cpu"))
    except DeviceError as error:
        return f"{error.where}: {error}"
    return "ok"


def checked_with_wrong_sums(layout: Layout) -> str:
    """As torch 2.7 and 2.8 have it over gloo: where a mean is asked for, a sum comes. Only rank 1's library is so."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: object, **more: object) -> object:
        done = right(tensor, *args, **more)  # type: ignore[arg-type]
        tensor.mul_(2)
        return done

    if dist.get_rank() == 1:
        dist.all_reduce = wrong  # type: ignore[assignment]
    try:
        return checked(layout)
    finally:
        dist.all_reduce = right


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_of_a_layout_are_right(ranks: Ranks, name: str) -> None:
    assert ranks.run(2, checked, LAYOUTS[name]) == ["ok"] * 2


@pytest.mark.full
@pytest.mark.parametrize("name", LARGER)
def test_collectives_of_larger_layouts_are_right(ranks: Ranks, name: str) -> None:
    layout = LARGER[name]
    assert ranks.run(layout.size, checked, layout) == ["ok"] * layout.size


def test_a_wrong_sum_on_one_rank_is_refused_by_name_on_all(ranks: Ranks) -> None:
    for said in ranks.run(2, checked_with_wrong_sums, Layout(dp=2)):
        assert "all_reduce does not work with torch" in said
        assert "rank 1: [20.0, 24.0, 28.0, 32.0] came where [10.0, 12.0, 14.0, 16.0] should" in said
        assert said.startswith("data_parallel_degree: ")
