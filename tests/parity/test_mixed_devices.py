"""One job on two vendors: a pipeline across, an uneven cut, a tiny MoE with adapters, in float64 beside one process."""

from __future__ import annotations

from typing import Any

import pytest

from support.mixed_job import Trained, check, train, train_in_rank
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two ranks, cut 3:1": (dict(pp=2, stage_cuts=(3,)), ("toy", "second")),
    "two islands of two stages": (dict(pp=4, stage_cuts=(1, 2, 3)), ("toy", "toy", "second", "second")),
    "two islands of two data ranks, cut 1:3": (dict(pp=2, dp=2, stage_cuts=(1,)), ("toy", "toy", "second", "second")),
    "two islands, tensor parallel inside": (
        dict(pp=2, tp=2, stage_cuts=(3,)), ("toy", "toy", "second", "second")
    ),
}  # fmt: skip
HEAVY = ("two islands, tensor parallel inside", "two islands of two data ranks, cut 1:3")
_alone: dict[bool, Trained] = {}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((n, True) if n not in HEAVY else pytest.param(n, True, marks=pytest.mark.full) for n in CASES),
        pytest.param("two ranks, cut 3:1", False, marks=pytest.mark.full),  # a tied embedding on both islands
    ],
)
def test_two_vendors_in_one_job_train_as_one_process_does(name: str, lora: bool, ranks: Ranks) -> None:
    if lora not in _alone:
        _alone[lora] = train({}, ("toy",), lora)
    axes, interconnects = CASES[name]
    answers = [Trained(*got) for got in ranks.run(len(interconnects), train_in_rank, axes, interconnects, lora)]
    if "tp" in axes:  # the loss of a cut head is formed in fp32
        check(answers, _alone[lora], interconnects, 1e-6)
        return
    check(answers, _alone[lora], interconnects, 1e-9)
    # On the CPU twice the same kernels run; on a CPU and a card 1e-9 needs float64 in every operation.
    for got in (_alone[lora], *answers):
        assert not got.narrow, f"computed in less than float64: {sorted(set(got.narrow))}"
