"""Layouts as numbers: who is where, and what is said when a product does not fit."""

from __future__ import annotations

import pytest

from erniekit.errors import PlanError
from erniekit.parallel.mesh import Layout, World, fit
from erniekit.parallel.world import check_model, layout_of


class Section:
    """The parallel section's values, as config would hand them over."""

    def __init__(self, **values: object) -> None:
        plain = dict(
            pipeline_parallel_degree=1, data_parallel_degree=1, sharding_parallel_degree=1, context_parallel_degree=1,
            sep_parallel_degree=1, tensor_parallel_degree=1, sequence_parallel=False, sharding=(), virtual_pp_degree=1,
            pp_seg_method=(),
        )  # fmt: skip
        self.__dict__.update({**plain, **values})


def test_every_rank_has_one_place_and_every_place_one_rank() -> None:
    layout = Layout(pp=2, dp=2, fsdp=3, cp=2, tp=2)
    assert layout.size == 48
    places = [tuple(layout.coords(rank).values()) for rank in range(48)]
    assert len(set(places)) == 48
    assert all(layout.rank(**layout.coords(rank)) == rank for rank in range(48))


def test_tensor_parallel_ranks_are_neighbours_and_share_their_data() -> None:
    layout = Layout(dp=2, tp=4)
    assert [layout.coords(r)["tp"] for r in range(4)] == [0, 1, 2, 3]
    assert [layout.data_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_data_parallelism_takes_what_is_left() -> None:
    assert fit(8, Layout(tp=2, pp=2)).dp == 2
    assert fit(1, Layout()).dp == 1


@pytest.mark.parametrize(("world", "layout"), [(6, Layout(tp=4)), (4, Layout(tp=2, pp=4)), (8, Layout(dp=3, tp=2))])
def test_a_product_that_does_not_fit_names_the_numbers_and_what_would(world: int, layout: Layout) -> None:
    with pytest.raises(PlanError) as caught:
        fit(world, layout)
    assert f"there are {world}" in caught.value.what
    assert "ranks" in caught.value.fix
    assert f"on {world}:" in caught.value.fix


def test_explicit_stage_bounds_count_the_embedding_as_entry_zero() -> None:
    layout = layout_of(Section(pipeline_parallel_degree=2, pp_seg_method=("0", "29", "57")))
    assert layout.stage_cuts == (28,), "entry 29 is layer 28: the 300B recipes' cut of 54 layers"
    check_model(layout, 54)
    with pytest.raises(PlanError, match="3 stages"):
        layout_of(Section(pipeline_parallel_degree=2, pp_seg_method=("0", "19", "38", "57")))


def test_more_stages_than_layers_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(PlanError, match="this model has 12") as caught:
        check_model(Layout(pp=16), 12)
    assert "12 stages or fewer" in caught.value.fix


def test_sharding_words_choose_the_stage() -> None:
    assert layout_of(Section(sharding=("stage3",), sharding_parallel_degree=4)).sharding_stage == 3
    assert layout_of(Section(sharding_parallel_degree=4)).sharding_stage == 1
    assert not layout_of(Section(sequence_parallel=True)).sequence_parallel


def test_alone_every_decision_is_its_own_value() -> None:
    world = World()
    assert world.is_main
    assert (world.max(3), world.sum(2.5), world.gather("x"), world.broadcast("y")) == (3, 2.5, ["x"], "y")
    assert world.control is None
