"""Plans are those that were recorded, and what a search keeps from one layout for the next changes none of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from erniekit.errors import PlanError
from erniekit.parallel.layout import fit
from erniekit.planner.evaluate import evaluate
from erniekit.planner.search import layouts
from support.plans import CASES, job_on, planned
from support.shipped import ROOT

RECORDED = json.loads((ROOT / "tests/data/plans.json").read_text())


@pytest.mark.parametrize(("recipe", "cluster"), CASES)
def test_a_plan_is_as_recorded(recipe: str, cluster: str) -> None:
    assert planned(recipe, cluster) == RECORDED[f"{recipe} on {cluster}"]


@pytest.mark.parametrize(
    ("recipe", "cluster", "every"),
    [
        ("ERNIE-4.5-21B-A3B/dpo/run_dpo_lora_128k", "4x8xH100-80G", 19),
        ("ERNIE-4.5-300B-A47B/sft/run_sft_8k", "16x8x80G", 5),
        ("ERNIE-4.5-VL-28B-A3B/sft/run_sft_lora_32k", "8x80G", 7),
    ],
)
def test_a_layout_after_others_is_as_if_it_were_the_first(recipe: str, cluster: str, every: int) -> None:
    job, pool, ranks = job_on(recipe, cluster)
    fitting = []
    for layout in layouts(job, ranks, pool.devices):
        try:
            fitting.append(fit(ranks, layout))
        except PlanError:
            continue
    for layout in fitting:
        evaluate(job, layout, pool)
    assert job.known
    for number, layout in enumerate(fitting[::every]):
        exact = number % 4 == 0
        first = replace(job)  # knows of no layout
        assert not first.known
        assert evaluate(job, layout, pool, exact) == evaluate(first, layout, pool, exact), layout.describe()
