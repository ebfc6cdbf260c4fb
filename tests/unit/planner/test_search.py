"""What the search finds, refuses and says, on models whose answers are known."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from erniekit.config import load
from erniekit.parallel.layout import Layout, fit
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.cluster import parse
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import evaluate
from erniekit.planner.islands import across, split
from erniekit.planner.job import Job
from erniekit.planner.memory import GIB
from erniekit.planner.search import layouts, least_bytes, search, smallest
from erniekit.recipes.planning import job_of, levers, shape_of


def job(*words: str, packs: int = 32) -> Job:
    cfg = load(["train_dataset_path=y", "batch_size=1", "compute_type=bf16", *words], "train")
    return job_of(cfg, shape_of(cfg), packs)


LORA = ("model_name_or_path=ERNIE-4.5-21B-A3B", "fine_tuning=LoRA", "lora_rank=32", "max_seq_len=8192")
ALL = ("model_name_or_path=ERNIE-4.5-21B-A3B", "fine_tuning=Full", "max_seq_len=8192")


def pool(words: str) -> DevicePool:
    (island,) = parse(words).islands
    return DevicePool(island.card, rates_of(island.card), island.devices)


def test_every_layout_uses_all_ranks_and_is_tried_once() -> None:
    found = [fit(16, layout) for layout in layouts(job(*LORA), 16, 8)]
    assert len(found) == len(set(found))
    assert {layout.size for layout in found} == {16}
    assert {layout.tp for layout in found} == {1, 2, 4, 8}, "inside a machine"
    assert any(layout.experts_over_data for layout in found)


def test_what_fits_is_ranked_by_speed_and_stays_below_the_room() -> None:
    here = pool("8xA100-80G")
    found = search(job(*LORA), here, 8)
    speeds = [one.tokens for one in found.ranked[:8]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.most.total <= here.room and not one.problem for one in found.ranked)
    assert found.ranked[0].exact


def test_full_training_of_the_21b_needs_more_than_one_card_and_says_why() -> None:
    here = pool("1xH200-141G")
    found = search(job(*ALL), here, 1)
    assert not found.ranked
    count, why = found.failed["one device"]
    assert count == 1
    assert "optimiser" in why
    assert "GiB a rank of 129" in why
    assert smallest(job(*ALL), pool("8xH200-141G"), 64) in (4, 8)


def test_a_step_whose_packs_divide_over_no_rank_says_so() -> None:
    found = search(job(*LORA, packs=7), pool("8xA100-80G"), 8)
    assert all(one.layout.data_ranks == 1 for one in found.ranked)
    odd = replace(job(*LORA, packs=7), rows=2)
    assert "packs (7, 2 in a micro-batch)" in search(odd, pool("8xA100-80G"), 8).failed["any"][1]


def test_more_of_an_axis_takes_less_of_a_rank() -> None:
    here, one = pool("8xH200-141G"), job(*ALL)

    def gib(**axes: int | str | bool) -> float:
        layout = fit(8, Layout(**axes))  # type: ignore[arg-type]
        return evaluate(one, layout, replace(here, limit=1e15)).most.total / GIB

    assert gib(fsdp=8, sharding_stage=3) < gib(fsdp=8, sharding_stage=1) < gib(dp=8)
    assert gib(tp=8, sequence_parallel=True) < gib(tp=4, sequence_parallel=True) < gib(tp=2, sequence_parallel=True)
    assert gib(pp=8) < gib(pp=2)
    assert gib(dp=8, experts="data") < gib(dp=8)


def test_all_tokens_on_one_ranks_experts_take_more_than_balanced_ones() -> None:
    layout = fit(8, Layout(dp=8, experts="data"))
    made = evaluate(job(*LORA), layout, pool("8xH200-141G"), exact=True)
    assert made.worst > made.most.total
    alone = evaluate(job(*LORA), Layout(dp=8), pool("8xH200-141G"), exact=True)
    assert alone.worst == pytest.approx(alone.most.total), "all experts are here: routing changes nothing"


def test_layers_are_computed_again_only_where_memory_asks_for_it() -> None:
    long = job(*LORA[:3], "max_seq_len=32768")
    roomy, tight = (evaluate(long, Layout(), DevicePool(CARDS["h200"], rates_of(CARDS["h200"]), 1, limit=n * GIB),
                             exact=True) for n in (400, 80))  # fmt: skip
    assert not roomy.again
    assert 0 < len(tight.again) <= 28
    assert tight.seconds > roomy.seconds
    assert tight.keys["recompute"] is True
    assert len(tight.keys["no_recompute_layers"]) == 28 - len(tight.again)


def test_every_lever_takes_less_memory_or_less_time() -> None:
    cfg = load(["train_dataset_path=y", "batch_size=2", "compute_type=bf16", *LORA], "train")
    one, here = job_of(cfg, shape_of(cfg), 32), pool("8xH200-141G")
    before = evaluate(one, Layout(dp=8), here)
    found = {tuple(lever.keys): evaluate(lever.job, Layout(dp=8), here) for lever in levers(cfg, one)}
    assert {"recompute", "offload_optim", "frozen_base", "max_seq_len"} <= {keys[0] for keys in found}
    assert all(made.most.total < before.most.total for made in found.values())


def test_layers_are_split_in_proportion_and_all_of_them() -> None:
    assert split([1, 1, 1, 1], 28) == [7, 7, 7, 7]
    assert split([3.0, 1.0], 28) == [21, 7]
    assert split([100.0, 1.0, 1.0], 5) == [3, 1, 1]


def test_unlike_islands_share_a_pipeline_and_the_faster_has_more_layers() -> None:
    cluster = parse("8xH200-141G")
    mixed = replace(cluster, islands=(*cluster.islands, *parse("16xBI150-32G").islands))
    places = [DevicePool(i.card, rates_of(i.card), i.devices) for i in mixed.islands]
    found = across(job(*LORA), mixed, places)
    assert found.ranked
    best = found.ranked[0].layout
    bounds = [0, *best.stage_cuts, 28]
    layers = [b - a for a, b in itertools.pairwise(bounds)]
    assert layers[0] > layers[-1]
    assert found.ranked[0].keys["pp_seg_method"][-1] == 31


def calls_of(work: Callable[[], object]) -> int:
    """Python functions that were entered: work that is the same on every machine, however busy it is."""
    count = 0

    def entered(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_search_of_128_cards_counts_few_tensors_and_calls_little() -> None:
    """Five seconds of a plan are mostly torch's import; what a search may take beside it, in counted work."""
    one = job("model_name_or_path=ERNIE-4.5-300B-A47B", "fine_tuning=Full", "max_seq_len=8192", packs=8)
    here, found = pool("128x80G"), []
    calls = calls_of(lambda: found.append(search(one, here, 128)))
    (ranking,) = found
    assert 100 < ranking.tried < 400
    assert calls < 2500 * ranking.tried
    assert one.blocks.counted < 10 * ranking.tried, "a tensor that several layouts cut alike is counted once"
    assert calls_of(lambda: smallest(one, here, 128)) < 600_000


def test_a_layout_of_a_long_search_takes_few_calls() -> None:
    """Thousands of layouts on 128 cards are to be counted in a second: a layout may take no object for every tensor."""
    one = job("model_name_or_path=ERNIE-4.5-21B-A3B", "fine_tuning=LoRA", "max_seq_len=32768", packs=64)
    here, found = pool("16xA100-80G"), []
    calls = calls_of(lambda: found.append(search(one, here, 16)))
    (ranking,) = found
    assert ranking.tried > 500
    assert calls < 400 * ranking.tried
    assert one.blocks.counted < ranking.tried


def test_too_few_devices_for_the_weights_alone_are_not_searched() -> None:
    one, here = job(*ALL), pool("8xA100-80G")
    held = least_bytes(one) / here.room
    assert held > 2, "more than two cards"
    before = one.blocks.counted
    assert smallest(one, replace(here, devices=2), 1) is None
    assert one.blocks.counted == before
    for layout in (
        Layout(),
        fit(8, Layout(fsdp=8, sharding_stage=3)),
        fit(8, Layout(dp=2, tp=4, sequence_parallel=True)),
    ):
        taken = evaluate(one, layout, replace(here, limit=1e15))
        together = layout.size * (taken.most.weights + taken.most.optimiser)
        assert least_bytes(one) <= together
