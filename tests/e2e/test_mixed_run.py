"""One job on two kinds of device as a user types it: same losses as one process, a loss of one side is noticed, and the
other goes on alone. Both kinds compute on the CPU (tests/support); tests/device has a card and a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import toy_device
from support.mixed_run import NOTICED_S, STEPS, MixedRun, kill_and_resume, make_models

TOYS = Path(toy_device.__file__).parent
MIXED = "toy:1:1,second:1:3"
LOSS = 2e-6  # the same kernels, in another order


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(TOYS), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": paths, "ERNIEKIT_DEVICES": "toy=toy_device,second=second_toy"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    job = MixedRun(tmp_path_factory.mktemp("one") / "run", models, environment()).start(device="toy")
    job.wait()
    assert len(job.losses()) == STEPS
    return job.losses()


@pytest.fixture
def mixed(models: Path, tmp_path: Path) -> Iterator[MixedRun]:
    job = MixedRun(tmp_path / "run", models, environment()).start(device="toy", islands=MIXED)
    yield job
    job.end()


@pytest.mark.full
def test_two_kinds_of_device_train_as_one_process_does(mixed: MixedRun, alone: list[float]) -> None:
    said = mixed.wait()
    assert "islands  toy: rank 0, second: rank 1" in said
    assert "stage 0  1 layer on toy" in said, "the second is three times as fast"
    assert mixed.losses() == pytest.approx(alone, abs=LOSS)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "left"), [(0, "second"), (1, "toy")], ids=["first killed", "second killed"])
def test_a_side_that_is_killed_is_noticed_and_the_other_goes_on_alone(
    alone: list[float], mixed: MixedRun, rank: int, left: str
) -> None:
    assert kill_and_resume(mixed, rank, left).noticed_s < NOTICED_S
    assert mixed.losses() == pytest.approx(alone, abs=LOSS)


def test_islands_of_another_number_of_ranks_are_refused_before_any_starts(models: Path, tmp_path: Path) -> None:
    job = MixedRun(tmp_path / "out", models, environment()).start(islands="toy:2,second:1")
    assert job.process is not None
    assert job.process.wait(300) == 2
    assert "islands names 3 ranks, and 2 are started" in job.said()
