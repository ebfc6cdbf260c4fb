"""Ranks on unlike devices agree on where the layers are cut: by the speeds a recipe gives, or by those they measure."""

from __future__ import annotations

import pytest
import torch

from erniekit.config import load
from erniekit.devices import pick
from erniekit.models.released import released
from erniekit.parallel.islands import Islands
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.recipes import island_stages
from erniekit.recipes.planning import shape_of
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
MODEL = "baidu/ERNIE-4.5-0.3B-Paddle"


def cuts(islands: str, by_hand: tuple[int, ...] = ()) -> tuple[int, ...]:
    rank = torch.distributed.get_rank()
    cfg = load([
        f"model_name_or_path={MODEL}", f"islands={islands}", "pipeline_parallel_degree=2", "max_seq_len=512",
        "gradient_accumulation_steps=4", "compute_type=fp32",
    ])  # fmt: skip
    layout = Layout(pp=2, stage_cuts=by_hand)
    world = World(layout, rank, islands=Islands(("gpu", "cpu"), ("gloo", "gloo")))
    island_stages.MEASURED_S = 0.05
    return island_stages.cut(cfg, pick("cpu"), world, shape_of(cfg).config).stage_cuts


def test_the_faster_island_has_more_layers_and_a_cut_by_hand_stays(ranks: Ranks) -> None:
    layers = released(MODEL)["num_hidden_layers"]
    slow_first, fast_first, measured = (
        ranks.run(2, cuts, words) for words in ("gpu:1:1,cpu:1:3", "gpu:1:3,cpu:1:1", "gpu:1,cpu:1:3")
    )
    for both in (slow_first, fast_first, measured):
        assert both[0] == both[1], "every rank cuts alike"
    assert 1 <= slow_first[0][0] < layers / 2 < fast_first[0][0] < layers
    assert 1 <= measured[0][0] < layers
    assert ranks.run(2, cuts, "gpu:1:1,cpu:1:3", (5,)) == [(5,), (5,)]


def test_memory_that_is_given_bounds_a_stage(ranks: Ranks) -> None:
    (roomy, _), (tight, _) = (ranks.run(2, cuts, w) for w in ("gpu:1:9:64G,cpu:1:1:64G", "gpu:1:9:2G,cpu:1:1:64G"))
    assert tight[0] < roomy[0]
