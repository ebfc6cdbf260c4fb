"""Plans beside measurements: what a workload's result has of them, what is recorded, and what can be read again."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from erniekit.bench.planned import Facts, Record, as_file, error_of, plan_of, read_records, record_of
from erniekit.bench.worker import measure
from erniekit.bench.workloads import WORKLOADS, BenchOptions, tiny

ROOT = Path(__file__).resolve().parents[3]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_check", ROOT / "benchmarks" / "planner.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKS = script().CHECKS


def test_a_result_has_the_plan_of_what_ran_and_becomes_a_record_with_a_peak(tmp_path: Path) -> None:
    work = tiny(WORKLOADS["C1-60"])
    result = measure(work, BenchOptions((), 1, 1, True), lambda _: None)
    plan = result["runs"][0]["planned"]
    assert plan["again"] == 2, "as the run decided: its limit is far below what it takes"
    assert plan["document"] == work.rows.length
    assert plan["trained"] == pytest.approx(1, abs=0.05)
    assert plan["gib"] > 0
    assert plan["step_ms"] > 0
    assert record_of("C1-60", work, {}, result) is None, "a CPU counts no peak"
    result["runs"][0]["peak_gib"] = 0.5
    record = record_of("C1-60", work, {"attention": "varlen"}, json.loads(json.dumps(result)))
    assert record is not None
    assert record.facts.again == 2
    assert record.step_ms == result["runs"][0]["step_ms"]
    file = tmp_path / "records.json"
    file.write_text(as_file([record]))
    assert read_records(file) == [record]


def test_keys_over_a_workloads_own_and_layers_computed_again_are_planned() -> None:
    plain = Record("x", "C1-85", Facts(0, 8192, 1.0), 70.0, 300.0)
    whole = Record(
        "x", "C1-85", Facts(28, 8192, 1.0), 70.0, 300.0, {"recompute": True, "recompute_granularity": "full"}
    )
    packed = Record("x", "C2-45", Facts(0, 8192, 1.0), 70.0, 300.0)
    assert plan_of(whole).most.total < 0.8 * plan_of(plain).most.total
    assert plan_of(whole).seconds > 1.2 * plan_of(plain).seconds
    assert plan_of(packed).most.weights < 0.4 * plan_of(plain).most.weights
    found = error_of(plain)
    assert found.memory == found.gib / 70 - 1
    assert found.within == (-0.02 <= found.memory <= 0.05 and abs(found.time) <= 0.1)


def test_a_file_of_something_else_is_no_record(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="not a file of recorded runs"):
        read_records(file)


def test_the_cards_runs_have_every_kind_and_names_of_their_own() -> None:
    assert len(CHECKS) >= 14
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    first = [WORKLOADS[check.workload] for check in CHECKS[:10]]
    assert {work.stage for work in first} == {"SFT", "DPO", "PT"}
    assert {work.rows.length for work in first} >= {4096, 8192, 32768, 131072}
    assert any(work.keys.get("compute_type") == "wint4/8" for work in first)
    assert any(check.keys.get("recompute") for check in CHECKS[:10])


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_run_of_the_check_can_be_planned(check) -> None:  # type: ignore[no-untyped-def]
    rows = WORKLOADS[check.workload].rows
    made = plan_of(Record(check.name, check.workload, Facts(0, rows.length, 1.0), 1.0, 1.0, check.keys))
    assert made.most.total > 2**30
    assert made.seconds > 0


def test_what_was_measured_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, elsewhere = (
        Record(name, name, Facts(0, 8192, 1.0), 11.0, 66.0, {}, "benchmarks/planner.py on a card")
        for name in ("A1b", "F1b")
    )
    (tmp_path / "planner.json").write_text(as_file([done]))
    (tmp_path / "other.json").write_text(as_file([elsewhere]))
    words = ["--output", str(tmp_path), "--known", str(tmp_path / "other.json"), "--only", "A1b,F1b"]
    monkeypatch.setattr(sys, "argv", ["planner.py", *words])
    assert script().main() == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == ["A1b", "F1b"]
