"""What only the number of ranks decides: the accumulation a global batch needs, or the global batch that comes out."""

from __future__ import annotations

import pytest

from erniekit.config import RunConfig, accumulation_for, for_world, load
from erniekit.errors import ConfigError


@pytest.mark.parametrize(("size", "batch", "ranks", "steps"), [(32, 1, 1, 32), (32, 2, 4, 4), (32, 4, 8, 1)])
def test_a_global_batch_is_dealt_to_the_ranks(size, batch, ranks, steps):
    assert accumulation_for(size, batch, ranks) == steps


def test_numbers_that_do_not_come_out_even_are_refused_with_the_nearest_that_do():
    with pytest.raises(ConfigError) as e:
        accumulation_for(36, 4, 2, "r.yaml:3")
    assert e.value.what == "global_batch_size is 36, not a multiple of batch_size 4 x 2 data ranks = 8"
    assert e.value.where == "r.yaml:3"
    assert e.value.fix == "global_batch_size: 32 or 40, or batch_size: 3"
    assert accumulation_for(36, 3, 2) == 6


def test_a_global_batch_below_one_micro_step_is_raised_or_cut_smaller():
    with pytest.raises(ConfigError) as e:
        accumulation_for(6, 4, 3)
    assert e.value.fix == "global_batch_size: 12, or batch_size: 2"
    with pytest.raises(ConfigError) as e:
        accumulation_for(7, 1, 4)  # no batch size helps: 7 do not divide over 4
    assert e.value.fix == "global_batch_size: 4 or 8"


def test_more_data_ranks_accumulate_less():
    cfg = load(["global_batch_size=32", "batch_size=2"])
    spread = for_world(cfg, 4)
    assert spread.train.gradient_accumulation_steps == 4
    assert spread.train.global_batch_size == 32
    told = [str(n) for n in spread.notes if n.key == "gradient_accumulation_steps"]
    assert told == ["gradient_accumulation_steps: 1 -> 4 (global_batch_size 32 / (batch_size 2 x data ranks 4))"]
    assert spread.origin("gradient_accumulation_steps") == "derived"
    assert for_world(spread, 4) == spread
    assert for_world(spread, 1).train.gradient_accumulation_steps == 16


def test_an_accumulation_that_was_given_stands_and_makes_the_global_batch():
    cfg = for_world(load(["gradient_accumulation_steps=8", "batch_size=2"]), 4)
    assert (cfg.train.gradient_accumulation_steps, cfg.train.global_batch_size) == (8, 64)
    both = for_world(load(["gradient_accumulation_steps=8", "global_batch_size=8"]), 4)
    assert (both.train.gradient_accumulation_steps, both.train.global_batch_size) == (8, 32)
    assert not next(n for n in both.notes if n.key == "global_batch_size").quiet


def test_a_global_batch_that_the_world_cannot_take_is_refused():
    with pytest.raises(ConfigError, match="3 data ranks"):
        for_world(load(["global_batch_size=32"]), 3)


def test_interleaved_micro_batches_are_checked_with_the_world():
    cfg = load(["global_batch_size=24", "pipeline_parallel_degree=4", "virtual_pp_degree=2"])
    assert for_world(cfg, 2).train.gradient_accumulation_steps == 12
    with pytest.raises(ConfigError, match="not a multiple of pipeline_parallel_degree 4"):
        for_world(cfg, 4)


def test_one_rank_changes_nothing():
    cfg = load(["gradient_accumulation_steps=8"])
    assert for_world(cfg, 1) == cfg
    cfg = load(["global_batch_size=32"])
    assert for_world(cfg, 1).flat() == cfg.flat()


def test_a_run_fitted_to_a_world_is_stored_and_read_back():
    cfg = for_world(load(["global_batch_size=32"]), 4)
    assert RunConfig.from_json(cfg.to_json()) == cfg
