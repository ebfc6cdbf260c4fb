"""Layouts as numbers: who is where, and what is said when a product does not fit."""

from __future__ import annotations

import pytest

from erniekit.errors import PlanError
from erniekit.parallel.layout import Layout, fit
from erniekit.parallel.world import check_model, layout_of


class Section:
    """The parallel section's values, as config would hand them over."""

    def __init__(self, **values: object) -> None:
        plain = dict(
            pipeline_parallel_degree=1, data_parallel_degree=1, sharding_parallel_degree=1, context_parallel_degree=1,
            sep_parallel_degree=1, tensor_parallel_degree=1, sequence_parallel=False, sharding=(), virtual_pp_degree=1,
            pp_seg_method=(), expert_parallel_degree=1,
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


def test_a_written_number_of_replicas_is_the_only_one_that_fits() -> None:
    with pytest.raises(PlanError) as caught:
        fit(8, Layout(dp=2, tp=2))
    assert caught.value.what == "data_parallel_degree=2 x tensor_parallel_degree=2 needs 4 ranks; there are 8"
    assert caught.value.fix.startswith("start 4 ranks, or on 8:")


def test_one_rank_is_no_plural() -> None:
    with pytest.raises(PlanError) as caught:
        fit(1, Layout(tp=2))
    assert caught.value.what == "tensor_parallel_degree=2 needs a multiple of 2 ranks; there is 1"


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


# --- experts ---


def test_experts_over_data_ranks_are_dealt_to_neighbours_and_the_rest_hold_copies() -> None:
    layout = Layout(dp=2, fsdp=2, cp=2, tp=2, experts="data", ep=4)
    assert (layout.expert_ranks, layout.expert_copies) == (4, 2)
    places = [layout.expert_place(rank) for rank in range(16)]
    assert places == [(data % 4, data // 4) for data in range(8) for _ in range(2)], "tensor-parallel ranks go together"
    for rank in range(16):
        place, copy = layout.expert_place(rank)
        assert layout.expert_rank(place, copy, tp=layout.coords(rank)["tp"]) == rank


def test_the_words_of_moe_group_say_which_ranks_experts_are_dealt_to() -> None:
    section = Section(tensor_parallel_degree=2, sharding_parallel_degree=4, sequence_parallel=True)
    got = {word: fit(8, layout_of(section, 8, word)) for word in ("mp", "ep", "world", "dummy")}
    assert {word: layout.expert_ranks for word, layout in got.items()} == dict(mp=2, ep=4, world=8, dummy=1)
    assert got["mp"].experts_over == "tp"
    assert not got["mp"].experts_over_data
    assert layout_of(Section(), 1, "mp").experts_over == "none", "one rank has all of them"


def test_the_pretraining_recipes_put_experts_over_eight_of_the_sharding_ranks() -> None:
    section = Section(pipeline_parallel_degree=12, sharding_parallel_degree=168, expert_parallel_degree=8)
    layout = fit(2016, layout_of(section, 2016, "ep"))
    assert (layout.expert_ranks, layout.expert_copies) == (8, 21)


def test_a_degree_that_does_not_divide_the_data_ranks_is_refused_with_those_that_do() -> None:
    with pytest.raises(PlanError, match="expert_parallel_degree=4 does not divide the 6") as caught:
        fit(6, Layout(experts="data", ep=4))
    assert "2 or 3 or 6" in caught.value.fix


def test_experts_over_all_ranks_need_sequences_cut_over_the_tensor_parallel_ones() -> None:
    with pytest.raises(PlanError, match="same tokens") as caught:
        fit(4, Layout(tp=2, experts="world"))
    assert "sequence_parallel: True" in caught.value.fix
    assert fit(4, Layout(tp=2, experts="world", sequence_parallel=True)).expert_ranks == 4


def test_more_ranks_than_experts_are_refused_with_a_degree_that_works() -> None:
    with pytest.raises(PlanError, match="8 ranks for 6 experts") as caught:
        check_model(Layout(dp=8, experts="data"), 12, 6)
    assert "expert_parallel_degree: 4" in caught.value.fix


def test_a_dense_model_passes_over_where_experts_would_go() -> None:
    assert check_model(Layout(tp=2, experts="tp"), 12) == Layout(tp=2)
    assert check_model(Layout(tp=2, experts="tp"), 12, 64).experts_over == "tp"
