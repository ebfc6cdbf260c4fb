"""Learning rates against those recorded from paddleformers' schedulers, and the one place where ours differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.config.flat import KEYS
from erniekit.optim.schedule import Schedule


def recorded(paddle: Path) -> list[dict]:
    return json.loads((paddle / "schedules.json").read_text())["cases"]


def test_every_recorded_schedule_is_reproduced(paddle: Path) -> None:
    cases = recorded(paddle)
    assert {c["type"] for c in cases} == set(KEYS["lr_scheduler_type"].choices) - {"wsd"}
    for case in cases:
        schedule = Schedule(case["type"], case["lr"], case["total"], case["warmup"], **case["extra"])
        got = [schedule.at(s) for s in range(case["total"] + 1)]
        assert got == pytest.approx(case["lr_at_step_0_to_total"], rel=1e-9, abs=1e-15), case


def test_the_first_update_has_a_learning_rate_and_warmup_ends_at_the_peak() -> None:
    schedule = Schedule("cosine", 1e-3, 100, 4)
    rates = [schedule.for_update(k) for k in range(1, 7)]
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert rates[4] == pytest.approx(1e-3)
    assert rates[5] < 1e-3


def test_compat_runs_the_first_update_at_zero_as_erniekit_does() -> None:
    schedule = Schedule("linear", 1e-3, 100, 4, one_step_late=True)
    assert [schedule.for_update(k) for k in (1, 2, 5)] == pytest.approx([0.0, 2.5e-4, 1e-3])


def test_decay_ends_where_decay_steps_says() -> None:
    schedule = Schedule("cosine", 1e-3, 100, 0, min_lr=1e-4, decay_steps=50)
    assert schedule.at(50) == pytest.approx(1e-4)
    assert schedule.at(99) == pytest.approx(1e-4)


def test_no_update_of_a_linear_run_is_wasted_at_zero() -> None:
    schedule = Schedule("linear", 1e-3, 10, 0)
    assert all(schedule.for_update(k) > 0 for k in range(1, 11))


def test_wsd_warms_up_holds_and_decays_to_its_floor() -> None:
    for function in ("half_life", "1-sqrt"):
        schedule = Schedule("wsd", 1e-3, 100, 10, min_lr=1e-4, steady_steps=60, decay_function=function)
        rates = [schedule.at(s) for s in range(101)]
        assert rates[5] == pytest.approx(5e-4)
        assert set(rates[10:61]) == {1e-3}
        assert rates[60:] == sorted(rates[60:], reverse=True)
        assert rates[100] == pytest.approx(1e-4)
    middle = Schedule("wsd", 1e-3, 100, 0, steady_steps=60).at(80)
    assert middle == pytest.approx(1e-3 * (0.05**0.5 - 0.05) / 0.95)


def test_wsd_decays_in_the_last_tenth_when_nothing_is_said() -> None:
    schedule = Schedule("wsd", 1e-3, 100)
    assert schedule.at(89) == 1e-3
    assert schedule.at(95) < 1e-3
