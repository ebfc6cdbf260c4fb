"""`erniekit bench --calibrate --tiny`: every part gives a rate, and the planner takes the file."""

from __future__ import annotations

import json
from pathlib import Path

from erniekit.cli.main import main
from erniekit.planner.cards import CARDS, rates_of


def test_a_calibration_has_every_rate_and_makes_a_plan_measured(tmp_path: Path) -> None:
    assert main(["bench", "--calibrate", "--tiny", "--output_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "calibration.json").read_text())
    rates = rates_of(CARDS["cpu"], found)
    for name in ("dense", "grouped", "attention", "elementwise", "update", "launch"):
        assert rates.source[name] == "measured"
    assert rates.source["link"] == "data sheet", "one rank has no link"
    assert min(row["rate"] for kind in ("dense", "grouped", "attention") for row in found[kind]) > 0
    assert [row["length"] for row in found["attention"]] == [32, 64]


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("mine")
    assert main(["bench", "--calibrate", "--tiny", "--output_dir", str(tmp_path)]) == 2
    assert (tmp_path / "calibration.json").read_text() == "mine"
