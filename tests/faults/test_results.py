"""The table of faults tells what ran, what failed and what was left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults import results


@pytest.fixture
def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "COLLECTED", tmp_path / "build" / "faults.json")
    monkeypatch.setattr(results, "TABLE", tmp_path / "faults.md")
    return tmp_path / "build" / "faults.json"


def book(row: str, what: str, count: int, **values: int) -> None:
    with results.fault(row, what) as entry:
        entry.count = entry.hits = count
        for name, value in values.items():
            setattr(entry, name, value)


def lines(path: Path, row: str) -> list[list[str]]:
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in path.read_text().splitlines()]
    return [cells for cells in found if cells and cells[0] == row]


def test_cases_of_one_fault_are_added_up_and_a_promise_not_made_is_a_dash(collected: Path) -> None:
    for _ in range(3):
        book("R2", "layouts", 1, differing=0)
    book("K1", "kills", 60, lost=0, torn=1)
    results.write_table()
    ((_, what, count, hits, lost, torn, differing, *_),) = lines(results.TABLE, "R2")
    assert (what, count, hits, lost, torn, differing) == ("layouts", "3", "3", "-", "-", "0")
    assert "**63 faults: 0 checkpoints lost, 1 torn, 0 losses" in results.TABLE.read_text()


def test_a_failed_row_is_booked_and_named_and_so_is_one_that_did_not_run(collected: Path) -> None:
    with pytest.raises(AssertionError), results.fault("H1", "hang"):
        raise AssertionError("it stayed")
    results.write_table()
    table = results.TABLE.read_text()
    assert "**Failed: H1.**" in table
    assert lines(results.TABLE, "H1")[0][-1].startswith("FAILED")
    assert "Not run this time: K1, K2," in table


def test_rows_of_an_earlier_run_are_forgotten(collected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book("K1", "kills", 60)
    monkeypatch.setattr(results, "RUN", "another")
    results.write_table(of_this_run=True)
    assert not results.TABLE.exists(), "nothing of this run to draw"
    book("K2", "calls", 5)
    assert [row["row"] for row in json.loads(collected.read_text())["rows"]] == ["K2"]
