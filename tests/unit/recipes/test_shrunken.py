"""A recipe made small: which degrees it keeps, and how many ranks that takes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from erniekit.config import load
from erniekit.errors import PlanError
from erniekit.parallel.layout import Layout, fit
from erniekit.parallel.world import layout_of
from erniekit.recipes.shrunken import DEGREES, SMALL, SMALL_EXPERTS, small_pre_training, small_run, small_shape, smaller

SHAPE = dict(SMALL, rms_norm_eps=1e-5, moe_num_shared_experts=1, tie_word_embeddings=True, **SMALL_EXPERTS)
FILES = ["model_name_or_path=nowhere", "train_dataset_path=none.jsonl"]


def small(words: list[str], most: int, layout: Layout | None = None) -> tuple[int, dict[str, Any]]:
    return small_run(load([*FILES, *words]), most, Path("out"), Path("cache"), layout)


def spread(keys: dict[str, Any]) -> dict[str, int]:
    return {name.removesuffix("_parallel_degree"): keys[name] for name in DEGREES if keys[name] > 1}


@pytest.mark.parametrize(
    ("words", "degrees"),
    [
        (["data_parallel_degree=2"], {"data": 2}),
        (["data_parallel_degree=16", "tensor_parallel_degree=8"], {"tensor": 2, "data": 2}),
        (["data_parallel_degree=4", "sharding_parallel_degree=-1", "sharding=stage1"], {"data": 2, "sharding": 2}),
        (["context_parallel_degree=8"], {"context": 4}),
        (["sep_parallel_degree=8"], {"context": 4}),
    ],
)
def test_every_axis_of_the_recipe_is_counted_and_halved(words: list[str], degrees: dict[str, int]) -> None:
    ranks, keys = small(words, most=4)
    assert spread(keys) == degrees
    assert ranks == math.prod(degrees.values())


@pytest.mark.parametrize(
    "words",
    [
        ["data_parallel_degree=8", "expert_parallel_degree=8"],
        ["data_parallel_degree=2", "sharding_parallel_degree=4", "expert_parallel_degree=8"],
        ["data_parallel_degree=2", "sharding_parallel_degree=4", "expert_parallel_degree=4"],
        ["tensor_parallel_degree=8", "moe_group=mp", "expert_parallel_degree=8"],
        ["tensor_parallel_degree=8", "expert_tensor_parallel_degree=8", "data_parallel_degree=2"],
        ["sep_parallel_degree=8"],
    ],
)
def test_the_small_keys_make_a_layout_of_as_many_ranks_with_experts_dealt_out_as_before(words: list[str]) -> None:
    ranks, keys = small(words, most=4)
    before = load([*FILES, *words])
    after = load([*FILES, *words, *(f"{name}={value}" for name, value in keys.items())])
    layouts = [layout_of(cfg.parallel, 1, cfg.moe.moe_group) for cfg in (before, after)]
    big, made = (fit(layout.size, layout) for layout in layouts)
    assert made.size == ranks
    assert made.experts_over == big.experts_over
    assert (made.expert_copies > 1) == (big.expert_copies > 1)


def test_ranks_beyond_the_recipes_degrees_are_replicas_that_are_made_small_too() -> None:
    ranks, keys = small(["tensor_parallel_degree=4"], 4, Layout(tp=4, dp=4))
    assert (ranks, spread(keys)) == (4, {"tensor": 2, "data": 2})


def test_a_global_batch_of_pre_training_counts_replicas() -> None:
    cfg = load([*FILES, "stage=PT", "input_dir=x", "data_parallel_degree=2"])
    _, keys = small_run(cfg, 2, Path("out"), Path("cache"))
    more = small_pre_training(cfg, keys, Path("tokenizer"), Path("corpus"))
    assert more["global_batch_size"] == 2 * keys["gradient_accumulation_steps"] * cfg.train.batch_size


def test_degrees_shrink_but_what_was_spread_stays_spread():
    assert smaller({"pp": 12, "tp": 8, "sd": 1}, 8) == {"pp": 3, "tp": 2, "sd": 1}
    with pytest.raises(PlanError, match="needs 8 ranks"):
        smaller({"pp": 4, "tp": 4, "sd": 4}, 4)


def test_a_small_shape_keeps_what_tells_models_apart():
    raw = dict(SHAPE, hidden_size=1024, num_attention_heads=16, head_dim=128, moe_layer_start_index=3)
    small = small_shape(raw)
    assert small["head_dim"] * small["num_attention_heads"] == 2 * small["hidden_size"]
    assert (small["moe_layer_start_index"], small["moe_num_shared_experts"]) == (3, 1)
    assert small["tie_word_embeddings"]
