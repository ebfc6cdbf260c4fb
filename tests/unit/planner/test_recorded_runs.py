"""Predicted against recorded: peaks and steps of runs on one H200 (benchmarks/planner_h200.json), and their table."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.bench.planned import HIGH, LOW, TIME, Record, error_of, error_table, read_records

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
