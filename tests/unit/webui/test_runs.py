"""Curves as the trainer writes them, read while they grow; rows of the runs list; runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.track.base import RunInfo
from erniekit.track.jsonl import FILE, JsonlTracker
from erniekit.track.results import write_results
from erniekit.track.runfile import RunRecord
from erniekit.webui.jobs import Jobs, WebJob
from erniekit.webui.runs import MetricSeries, MetricsReader, Runs, differences, thinned
from unit.webui.conftest import RECIPE, Stand, until


def info(output: Path, start: int = 0) -> RunInfo:
    return RunInfo(output_dir=output, logging_dir=output, total_steps=10, start_step=start)


@pytest.fixture
def ended(jobs: Jobs, stand: Stand) -> WebJob:
    stand.program = "pass"
    job = jobs.start("train", RECIPE + "max_steps: 10\n")
    return until(jobs, job.id, lambda job: not job.is_running)


def test_what_the_trainer_logs_is_what_the_page_draws(jobs: Jobs, ended: WebJob) -> None:
    runs, output = Runs(jobs), Path(ended.output_dir)
    assert runs.series(ended.id) == {}, "nothing is written yet"
    tracker, record = JsonlTracker(), RunRecord(output, command="erniekit train", version="0")
    record.start(info(output))
    tracker.start(info(output))
    seen = []
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 3.0 / step, "learning_rate": 1e-4, "tokens_per_second": 100.0}, "train")
        seen.append(len(runs.series(ended.id)["loss"]))
    tracker.log(3, {"eval_loss": 0.5}, "eval")
    assert seen == [1, 2, 3]
    series = runs.series(ended.id)
    assert series["loss"] == MetricSeries([1, 2, 3], [3.0, 1.5, 1.0])
    assert {"loss", "learning_rate", "tokens_per_second", "eval_loss"} == set(series)
    row = runs.row(ended.id)
    assert (row.step, row.total_steps, row.loss, row.eval_loss, row.tokens_per_second) == (3, 10, 1.0, 0.5, 100.0)
    assert (row.state, row.stage, row.model, row.progress) == ("ended", "SFT", "model", 0.3)
    assert [r.id for r in runs.rows()] == [ended.id]
    assert runs.rows(commands=("export",)) == []


def test_a_resumed_run_that_cuts_its_file_is_read_anew(jobs: Jobs, ended: WebJob) -> None:
    runs, output = Runs(jobs), Path(ended.output_dir)
    tracker = JsonlTracker()
    tracker.start(info(output))
    for step in (1, 2, 3, 4):
        tracker.log(step, {"loss": float(step)}, "train")
    tracker.close()
    assert runs.series(ended.id)["loss"].steps == [1, 2, 3, 4]
    tracker.start(info(output, start=2))
    tracker.log(3, {"loss": 30.0}, "train")
    assert runs.series(ended.id)["loss"] == MetricSeries([1, 2, 3], [1.0, 2.0, 30.0])


def test_only_new_lines_are_parsed_and_a_torn_one_waits_for_its_end(tmp_path: Path, monkeypatch) -> None:
    file, parsed = tmp_path / FILE, []
    reader = MetricsReader(file)
    add = MetricsReader._add
    monkeypatch.setattr(MetricsReader, "_add", lambda self, line: (parsed.append(line), add(self, line)))
    file.write_bytes(b'{"global_step": 1, "loss": 2.0}\n{"global_step": 2, "lo')
    assert reader.read()["loss"].steps == [1]
    with file.open("ab") as out:
        out.write(b'ss": 1.0}\n')
    assert reader.read()["loss"] == MetricSeries([1, 2], [2.0, 1.0])
    assert reader.read()["loss"].steps == [1, 2]
    assert len(parsed) == 2


def test_odd_lines_and_values_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / FILE
    lines = ["[1]", "nonsense", '{"loss": 1}', '{"global_step": "x", "loss": 1}', '{"global_step": 1, "loss": null}',
             '{"global_step": 2, "loss": 1e999, "ok": true, "name": "x"}', '{"global_step": 3, "loss": 4}']  # fmt: skip
    file.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    assert MetricsReader(file).read() == {"loss": MetricSeries([3], [4.0])}


def test_a_file_that_goes_away_gives_no_curves(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text('{"global_step": 1, "loss": 2}\n')
    reader = MetricsReader(file)
    assert reader.read()
    file.unlink()
    assert reader.read() == {}


def test_a_long_curve_is_thinned_and_keeps_its_spike_and_its_ends() -> None:
    values = [1.0] * 50_000
    values[31_234] = 99.0
    small = thinned(MetricSeries(list(range(50_000)), values), 500)
    assert len(small) <= 500
    assert max(small.values) == 99.0
    assert (small.steps[0], small.steps[-1]) == (0, 49_999)
    assert small.steps == sorted(small.steps)


def test_runs_side_by_side_share_their_steps_and_show_where_they_differ(jobs: Jobs, stand: Stand) -> None:
    stand.program = "pass"
    ids = []
    for rate, steps in (("1e-4", (1, 2)), ("2e-4", (2, 3))):
        job = jobs.start("train", f"{RECIPE}learning_rate: {rate}\n")
        until(jobs, job.id, lambda job: not job.is_running)
        Path(job.output_dir).mkdir()
        lines = [json.dumps({"global_step": s, "loss": s / 2}) for s in steps]
        (Path(job.output_dir) / FILE).write_text("\n".join(lines) + "\n")
        ids.append(job.id)
    found = Runs(jobs).compare([*ids, ids[0]])
    assert found.steps == [1, 2, 3]
    assert found.values == {ids[0]: [0.5, 1.0, None], ids[1]: [None, 1.0, 1.5]}
    assert found.differences["learning_rate"] == {ids[0]: 1e-4, ids[1]: 2e-4}
    assert "model_name_or_path" not in found.differences


def test_a_key_one_run_does_not_give_differs_by_its_default() -> None:
    assert differences({"a": {"lora_rank": 32}, "b": {}}) == {"lora_rank": {"a": 32, "b": 8}}
    assert differences({"a": {"lora_rank": 8}, "b": {}}) == {}


def test_the_results_a_run_left_are_found(jobs: Jobs, ended: WebJob) -> None:
    runs = Runs(jobs)
    assert runs.results(ended.id) == {}
    write_results(ended.output_dir, evaluation={"eval_loss": 0.25})
    assert runs.results(ended.id) == {"eval_loss": 0.25}
