"""docs/hardware/resources.md has what the planner says of the guide's table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resources_page", ROOT / "benchmarks" / "resources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_row_of_the_guide_once_and_some_as_they_are_planned() -> None:
    page = script()
    table = {line.split(" | ")[0].removeprefix("| "): line for line in page.table_of_page()}
    assert sorted(f"configs/{name}" for name in table) == sorted(page.guide())
    assert len(table) == 41
    some = ("configs/ERNIE-4.5-0.3B/sft/run_sft_8k", "configs/ERNIE-4.5-21B-A3B/dpo/run_dpo_lora_8k")
    for line in page.rows(some):
        assert line in table.values()


def test_a_row_whose_fewest_cards_are_no_more_than_the_guides_has_a_layout_there() -> None:
    for line in script().table_of_page():
        _, _, _, named, planned, layout, *_ = line.removeprefix("| ").split(" | ")
        more = planned.startswith("above") or int(planned.partition("x")[0]) > int(named.partition("x")[0])
        assert more == (layout == "nothing fits"), line


@pytest.mark.full
def test_the_whole_table_is_as_it_is_planned() -> None:
    page = script()
    assert page.table_of_page() == list(page.rows())
