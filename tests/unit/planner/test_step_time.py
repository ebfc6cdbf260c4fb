"""The step of one rank by itself, as `erniekit rehearse --rank` has it beside its clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from erniekit.config import load
from erniekit.parallel.layout import Layout
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import evaluate
from erniekit.planner.job import Job
from erniekit.planner.schedule import step_seconds
from erniekit.planner.step_time import alone, pipeline_stages
from erniekit.planner.timing import LinkRates, sharing_time, update_time
from erniekit.recipes.planning import job_of, shape_of

H200 = DevicePool(CARDS["h200"], rates_of(CARDS["h200"]), 8, limit=float("inf"))
# The Ascend guide's job on 128 cards.
ASCEND = "fine_tuning=Full max_seq_len=8192 recompute=True recompute_granularity=full offload_optim=True"
LAYOUT = Layout(pp=16, tp=8, sequence_parallel=True, experts="tp")


@pytest.fixture(scope="module")
def job() -> Job:
    words = f"model_name_or_path=ERNIE-4.5-300B-A47B train_dataset_path=y batch_size=1 compute_type=bf16 {ASCEND}"
    cfg = load(words.split(), "train")
    return job_of(cfg, shape_of(cfg), packs=8)


def seconds(job: Job, m: int, rank: int = 0) -> float:
    return alone(job, LAYOUT, rank, m, evaluate(job, LAYOUT, H200, exact=True).again, H200)


def test_micro_batches_are_added_and_the_update_is_not(job: Job) -> None:
    each = seconds(job, 3) - seconds(job, 2)
    assert seconds(job, 8) - seconds(job, 2) == pytest.approx(6 * each)
    share = job.blocks.stage(LAYOUT, range(4), True, False, 2)
    copied = 2 * (share.master + share.moments) / H200.rates.host
    assert seconds(job, 2) - 2 * each == pytest.approx(copied), "states in host memory come and go once a step"


def test_the_recorded_rank_of_the_ascend_job_is_near_its_plan(job: Job) -> None:
    """One H200, 2026-11-17: 0.55 s for two micro-batches, nothing sent. 20 %: how fast states come from the host and
    go back at the same time was never measured apart."""
    assert seconds(job, 2) == pytest.approx(0.55, rel=0.2)


def test_nothing_is_sent(job: Job) -> None:
    slow = replace(H200, rates=replace(H200.rates, link=1e6, network=1e6))
    again = evaluate(job, LAYOUT, H200, exact=True).again
    assert alone(job, LAYOUT, 0, 2, again, slow) == seconds(job, 2)


def test_a_rank_has_its_own_stages_and_its_own_weights(job: Job) -> None:
    assert seconds(job, 2, rank=15) != seconds(job, 2, rank=1) != seconds(job, 2, rank=0)


@pytest.mark.parametrize("layout", [LAYOUT, Layout(pp=8, tp=8, virtual_stages=2, sequence_parallel=True, experts="tp")])
def test_a_step_ends_with_the_update_of_the_rank_that_has_the_most_states(job: Job, layout: Layout) -> None:
    made = evaluate(job, layout, H200, exact=True)
    assert made.times is not None
    numbers = pipeline_stages(job, layout).numbers
    ranks = [(numbers[r], r == 0, r == layout.pp - 1) for r in range(layout.pp)]
    updates = [update_time(job.blocks.stage(layout, *rank, 8), job, H200.rates) for rank in ranks]
    piped = step_seconds("auto", layout.pp, layout.virtual_stages, 8, made.times)
    assert max(updates) > 1.5 * updates[0], "the first has dense layers"
    assert made.seconds == pytest.approx(piped + max(updates))


def test_sums_of_data_parallel_ranks_are_hidden_but_for_the_embeddings() -> None:
    words = "model_name_or_path=ERNIE-4.5-0.3B train_dataset_path=y compute_type=bf16 max_seq_len=8192"
    layout, together = Layout(dp=8), Layout(dp=8, cp=2)
    waiting = replace(H200, card=replace(H200.card, overlaps=False))

    def spared(fine_tuning: str, layout: Layout) -> tuple[float, float]:
        """Seconds of a step that overlap spares, and what all the sums take."""
        cfg = load([*words.split(), f"fine_tuning={fine_tuning}"], "train")
        job = job_of(cfg, shape_of(cfg), packs=8)
        share = job.blocks.stage(layout, range(18), True, True, 1)
        sums = sharing_time(job, layout, share, 1, LinkRates(H200.rates, H200.devices))[1]
        both = [evaluate(job, layout, place, exact=True).seconds for place in (waiting, H200)]
        return both[0] - both[1], sums

    hidden, sums = spared("Full", layout)
    embedding = 103_424 * 1024 / 360_748_032
    assert hidden == pytest.approx((1 - embedding) * sums)
    assert spared("LoRA", layout)[0] == 0 < spared("LoRA", layout)[1], "one bucket, after the pass"
    assert spared("Full", together)[0] == 0, "ranks exchange keys and values inside the layers"


def test_kernels_of_a_reference_are_launched_where_the_policys_layers_are_replayed() -> None:
    """0.3B, two pairs in 2K tokens: 24 and 35 ms on two machines with an H200 whose hosts differ."""
    words = "model_name_or_path=ERNIE-4.5-0.3B train_dataset_path=y batch_size=1 compute_type=bf16 fine_tuning=Full"
    found = {}
    for stage in ("SFT", "DPO"):
        cfg = load([*words.split(), "packing=True", "max_seq_len=2048", f"stage={stage}"], "train")
        job = replace(job_of(cfg, shape_of(cfg), packs=1), replayed=True)
        found[stage] = evaluate(job, Layout(), H200, exact=True).seconds
    assert 0.022 < found["DPO"] < 0.036
    assert found["SFT"] < 0.018, "nothing of it is launched"
