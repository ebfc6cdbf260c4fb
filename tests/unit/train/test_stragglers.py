"""Who counts as slow and at what; ranks that really are slow are in tests/distributed/test_guards.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.train import stragglers
from erniekit.train.stragglers import Stragglers, find_slow
from support.clock import Clock


def row(data: float, compute: float, communication: float = 0.0, **more: float) -> dict[str, float]:
    return {"data": data, "compute": compute, "communication": communication, **more}


class Recorded:
    """A world whose other ranks' times are given."""

    rank = 0

    def __init__(self, *others: dict[str, float]) -> None:
        self.others, self.calls = list(others), 0
        self.size = 1 + len(others)

    def gather(self, value: Any) -> list[Any]:
        self.calls += 1
        return [value, *self.others]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stragglers, "time", made)
    return made


def steps(clock: Clock, hook: Stragglers, first: int, last: int, compute: float = 0.0) -> None:
    for step in range(first, last + 1):
        hook.phase("data")
        hook.phase("forward/backward")
        clock.sleep(compute)
        hook.phase("collective")
        hook.after_step(None, SimpleNamespace(step=step))  # type: ignore[arg-type]


def test_a_rank_is_slow_by_its_own_work_though_all_steps_take_the_same() -> None:
    rows = [row(0.0, 0.1, 0.4), row(0.0, 0.5, 0.0), row(0.0, 0.1, 0.4), row(0.0, 0.1, 0.4)]
    assert find_slow(rows, 2.0) == [(1, "compute", 0.5, 0.1)]


def test_the_part_that_is_slow_is_named() -> None:
    rows = [row(0.01, 0.1), row(0.01, 0.1), row(0.5, 0.11)]
    assert [(rank, part) for rank, part, _, _ in find_slow(rows, 2.0)] == [(2, "data")]


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    assert [found[0] for found in find_slow([row(0, 0.5), row(0, 0.1)], 2.0)] == [0]


def test_even_ranks_and_tiny_steps_are_left_alone() -> None:
    assert find_slow([row(0, 0.1), row(0, 0.15), row(0, 0.12)], 2.0) == []
    assert find_slow([row(0, 0.001), row(0, 0.005)], 2.0) == [], "4 ms is noise"


def test_a_slow_card_shows_in_the_probe_alone() -> None:
    rows = [row(0, 0.2, device=0.001), row(0, 0.2, device=0.004), row(0, 0.2, device=0.001)]
    assert find_slow(rows, 2.0) == [(1, "device", 0.004, 0.001)]


def test_a_slow_rank_is_reported_once_an_interval_and_booked(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    world, events = Recorded(row(0, 1.0), row(0, 0.002)), []
    hook = Stragglers(world, 2.0, every=5, on_slow=lambda step, text: events.append((step, text)))  # type: ignore[arg-type]
    steps(clock, hook, 1, 14, compute=0.003)
    assert world.calls == 2
    assert [step for step, _ in events] == [5, 10]
    assert events[0][1].startswith("rank 1 is slow (compute): its own work takes 1e+03 ms")
    assert capsys.readouterr().err.count("rank 1 is slow") == 2
    table = hook.summary()
    assert table["checks"] == 2
    assert len(table["slow"]) == 1
    entry = table["slow"][0]
    assert (entry["rank"], entry["part"], entry["times"]) == (1, "compute", 2)
    assert (entry["first_step"], entry["last_step"]) == (5, 10)
    assert entry["worst"] > 100
    assert table["parts"]["compute"]["slowest_rank"] == 1
    assert table["parts"]["compute"]["median_ms"] == 3.0
    json.dumps(table)


def test_evaluating_saving_and_the_first_steps_are_not_a_ranks_own_work(clock: Clock) -> None:
    world = Recorded(row(0, 0.001))
    hook = Stragglers(world, 2.0, every=4)  # type: ignore[arg-type]
    steps(clock, hook, 1, 3, compute=0.03)
    hook.phase("save")
    clock.sleep(0.05)
    steps(clock, hook, 4, 4, compute=0.002)
    assert hook.checks == 1
    assert hook._latest[0] == pytest.approx(row(0.0, 0.002))


def test_a_short_run_has_a_table_too_and_one_rank_or_factor_zero_gathers_nothing(clock: Clock) -> None:
    world = Recorded(row(0, 0.001))
    hook = Stragglers(world, 2.0, every=50)  # type: ignore[arg-type]
    steps(clock, hook, 1, 6)
    hook.on_end(SimpleNamespace(state=SimpleNamespace(step=6)))  # type: ignore[arg-type]
    assert hook.summary()["checks"] == 1
    for world, factor in ((Recorded(), 2.0), (Recorded(row(0, 1.0)), 0.0)):
        hook = Stragglers(world, factor, every=1)  # type: ignore[arg-type]
        steps(clock, hook, 1, 6)
        hook.on_end(SimpleNamespace(state=SimpleNamespace(step=6)))  # type: ignore[arg-type]
        assert world.calls == 0
        assert hook.summary() == {"checks": 0, "factor": factor, "parts": {}, "slow": []}
