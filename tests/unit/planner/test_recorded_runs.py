"""Predicted against recorded: peaks and steps of runs on one H200 (benchmarks/planner_h200.json), and their table."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.bench.planned import HIGH, LOW, TIME, Record, error_of, error_table, plan_of, read_records

ROOT = Path(__file__).resolve().parents[3]
RECORDS = read_records(ROOT / "benchmarks" / "planner_h200.json")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_recorded_runs_peak_and_step_are_predicted(record: Record) -> None:
    found = error_of(record)
    print("\n".join(error_table([record])))
    assert -LOW <= found.memory <= HIGH
    assert abs(found.time) <= TIME


def test_the_planners_page_has_the_table_of_these_records() -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    assert "\n".join(error_table(RECORDS)) in page


@pytest.mark.parametrize(("name", "ms"), [("A1", 71.0), ("C1-85", 322.1), ("E1", 154.4)])
def test_steps_without_flash_attention_4_are_predicted_too(name: str, ms: float) -> None:
    """Recorded on one H200 on 2026-11-19 (benchmarks/versions.py), its packages as torch's wheel brings them."""
    record = next(record for record in RECORDS if record.name == name)
    made = plan_of(record, attention="rows", packed_attention="flash")
    assert 1000 * made.seconds == pytest.approx(ms, rel=0.05)
    assert made.seconds > plan_of(record).seconds
