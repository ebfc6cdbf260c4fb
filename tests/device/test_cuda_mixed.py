"""An NVIDIA card and a CPU in one job: two processes, hidden states through pinned memory and gloo.

In float64 losses, gradients and weights are those of one CPU process to 1e-9; `erniekit train` in fp32 loses either
side, notices, and ends on the CPU alone with the losses of a run that was never interrupted. The same without a card:
tests/parity/test_mixed_devices.py and tests/e2e/test_mixed_run.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from erniekit.devices import pick
from support.mixed_job import Trained, check, train, train_in_rank
from support.mixed_run import NOTICED_S, STEPS, MixedRun, Survived, kill_and_resume, make_models
from support.ranks import Ranks

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

EXACT = 1e-9  # relative, float64
# fp32 on both, TF32 off: products add up in another order. Losses are about 6; measured on CPUs they differ by 1e-6.
LOSS = 2e-4
CARD_FIRST, CPU_FIRST = "gpu:1:3,cpu:1:1", "cpu:1:1,gpu:1:3"
KILLED = {"card killed": 0, "CPU killed": 1}  # which rank
JOBS: dict[str, dict[str, Any]] = {
    "one": {},
    "card first": dict(islands=CARD_FIRST),
    "CPU first": dict(islands=CPU_FIRST),
    "card killed": dict(islands=CARD_FIRST),
    "CPU killed": dict(islands=CARD_FIRST),
    "all weights": dict(fine_tuning="Full"),
    "all weights, card first": dict(fine_tuning="Full", islands=CARD_FIRST, drift_check_steps=0),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, MixedRun]]:
    """All started at once: each waits for Python and the card most of its time."""
    models, folder = make_models(tmp_path_factory.mktemp("models")), tmp_path_factory.mktemp("jobs")
    made = {name: MixedRun(folder / name.replace(" ", "-").replace(",", ""), models) for name in JOBS}
    try:
        for name, keys in JOBS.items():
            made[name].start(**keys)
        yield made
    finally:
        for job in made.values():
            job.end()


@pytest.fixture(scope="module")
def kills(jobs: dict[str, MixedRun]) -> Iterator[dict[str, Future[Survived]]]:
    """Both at once, each as soon as its job has a checkpoint: steps take milliseconds."""
    with ThreadPoolExecutor() as threads:
        yield {name: threads.submit(kill_and_resume, jobs[name], rank, "cpu") for name, rank in KILLED.items()}


@pytest.mark.parametrize("name", KILLED)
def test_a_side_that_is_killed_is_noticed_and_the_cpu_goes_on_alone(
    jobs: dict[str, MixedRun], kills: dict[str, Future[Survived]], name: str
) -> None:
    survived = kills[name].result()
    assert survived.noticed_s < NOTICED_S
    jobs["one"].wait()
    got, want = jobs[name].losses(), jobs["one"].losses()
    assert len(got) == STEPS
    assert got == pytest.approx(want, abs=LOSS)


@pytest.mark.parametrize(("name", "first", "second"), [("card first", "gpu", "cpu"), ("CPU first", "cpu", "gpu")])
def test_a_card_and_a_cpu_in_one_job_train_as_one_process_does(
    jobs: dict[str, MixedRun], name: str, first: str, second: str
) -> None:
    said = jobs[name].wait()
    jobs["one"].wait()
    got, want = jobs[name].losses(), jobs["one"].losses()
    first, second = (pick(name).interconnect for name in (first, second))
    assert f"islands  {first}: rank 0, {second}: rank 1" in said
    assert got == pytest.approx(want, abs=LOSS)
    assert abs(want[0] - want[-1]) > 10 * LOSS, "it must really have trained"


def test_all_weights_with_a_tied_embedding_on_both_sides_train_too(jobs: dict[str, MixedRun]) -> None:
    """Its gradient is summed through the host; the two copies are compared bit for bit before each save."""
    for name in ("all weights", "all weights, card first"):
        jobs[name].wait()
    assert jobs["all weights, card first"].losses() == pytest.approx(jobs["all weights"].losses(), abs=LOSS)


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
@pytest.mark.parametrize(
    ("interconnects", "cut"), [(("gpu", "cpu"), 3), (("cpu", "gpu"), 1)], ids=["card first", "CPU first"]
)
def test_in_float64_losses_and_gradients_are_those_of_one_cpu_process(
    interconnects: tuple[str, str], cut: int, lora: bool, ranks: Ranks
) -> None:
    alone = train({}, ("cpu",), lora)
    answers = [Trained(*got) for got in ranks.run(2, train_in_rank, dict(pp=2, stage_cuts=(cut,)), interconnects, lora)]
    check(answers, alone, interconnects, EXACT)
    for got in (alone, *answers):
        assert not got.narrow, f"computed in less than float64: {sorted(set(got.narrow))}"
