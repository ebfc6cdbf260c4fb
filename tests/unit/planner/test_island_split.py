"""Layers by speed and memory: the slowest stage is as fast as any cut can make it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from erniekit.config import load
from erniekit.errors import PlanError
from erniekit.parallel.layout import Layout
from erniekit.planner.island_split import even_time, fitted, head_in_layers, stage_bytes
from erniekit.recipes.planning import job_of, shape_of


def slowest(counts: list[int], seconds: list[float], extra: list[float]) -> float:
    return max(n * t + e for n, t, e in zip(counts, seconds, extra))


@pytest.mark.parametrize(
    ("seconds", "extra", "layers"),
    [([1.0, 3.0], [0.0, 2.0], 28), ([1.0, 1.0, 2.5], [0.5, 0.0, 4.0], 13), ([5.0, 1.0], [0.0, 0.0], 9)],
)
def test_no_other_cut_is_faster(seconds: list[float], extra: list[float], layers: int) -> None:
    found = even_time(seconds, extra, [layers] * len(seconds), layers)
    assert sum(found) == layers
    every = []
    for cuts in combinations(range(1, layers), len(seconds) - 1):
        bounds = [0, *cuts, layers]
        every.append([b - a for a, b in pairwise(bounds)])
    assert slowest(found, seconds, extra) == min(slowest(counts, seconds, extra) for counts in every)


def test_a_stage_takes_no_more_than_it_may_and_what_fits_nowhere_is_said() -> None:
    assert even_time([1.0, 3.0], [0.0, 0.0], [4, 8], 10) == [4, 6]
    with pytest.raises(PlanError, match="at most 7 do"):
        even_time([1.0, 3.0], [0.0, 0.0], [4, 3], 10)


def test_memory_moves_layers_from_the_fast_device_to_the_slow_one() -> None:
    cfg = load(["model_name_or_path=baidu/ERNIE-4.5-21B-A3B-Paddle", "fine_tuning=LoRA", "max_seq_len=4096"])
    job, layout = job_of(cfg, shape_of(cfg), 8), Layout(pp=2)
    layers = job.model.num_layers
    roomy, taken = fitted(job, layout, [1.0, 3.0], [140 * 2**30] * 2, [True, True])
    assert roomy[0] > 2 * roomy[1]
    assert sum(roomy) == layers
    tight = taken[0].total * 0.9
    moved, held = fitted(job, layout, [1.0, 3.0], [tight, 140 * 2**30], [True, True])
    assert moved[0] < roomy[0]
    assert held[0].total <= tight
    assert [b.total for b in held] == [b.total for b in stage_bytes(job, layout, moved, [True, True])]
    assert 0 < head_in_layers(job.model) < layers
    with pytest.raises(PlanError, match="one layer in stage 0"):
        fitted(job, layout, [1.0, 3.0], [2**28, 140 * 2**30], [True, True])
