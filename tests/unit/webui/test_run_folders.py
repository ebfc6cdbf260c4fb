"""Runs that no job of the page has started: found by their run.json, named by people, resumed and reused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from erniekit.errors import ConfigError
from erniekit.files import OwnedFiles
from erniekit.files.output import RUN
from erniekit.webui.jobs import Jobs
from erniekit.webui.run_folders import MAX_DEPTH, RunFolders, kind_of, run_id
from erniekit.webui.run_names import FILE, MAX_NAME, RunNames
from erniekit.webui.runs import MetricSeries, Runs, time_left
from unit.webui.conftest import RECIPE, Stand, until


def write_run(folder: Path, status: str = "finished", steps: int = 3, **keys: object) -> Path:
    """A run folder as training leaves it."""
    folder.mkdir(parents=True)
    OwnedFiles(folder).open(RUN).claim("run.json", "metrics.jsonl")
    config = [{"key": key, "value": value, "origin": "recipe.yaml"} for key, value in keys.items()]
    config.append({"key": "lora_rank", "value": 8, "origin": "default"})
    story = {"status": status, "started": "2026-11-17T09:00:00+00:00", "total_steps": 10, "config": config}
    (folder / "run.json").write_text(json.dumps(story))
    rows = [{"global_step": n, "loss": 1.0 / n, "interval_steps_per_second": 2.0} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(jobs: Jobs, room: Path) -> Runs:
    return Runs(jobs, RunFolders([room], search_s=0.0))


def test_runs_are_found_below_every_folder_and_listed_beside_jobs(
    runs: Runs, jobs: Jobs, room: Path, tmp_path: Path, stand: Stand
) -> None:
    deep = write_run(room / "a" / "b" / "deep", learning_rate=1e-3)
    other = write_run(tmp_path / "elsewhere" / "run")
    write_run(room.joinpath(*map(str, range(MAX_DEPTH + 1))))
    write_run(room / ".hidden" / "run")
    write_run(deep / "checkpoint-2")
    stand.program = "pass"
    job = until(jobs, jobs.start("train", RECIPE).id, lambda job: not job.is_running)
    write_run(Path(job.output_dir))
    runs.folders.folders = (room, tmp_path / "elsewhere")
    assert {row.id for row in runs.rows()} == {job.id, run_id(deep), run_id(other)}
    row = runs.row(run_id(deep))
    assert (row.state, row.step, row.total_steps, row.is_job, row.output_dir) == ("ended", 3, 10, False, str(deep))
    assert runs.recipe(row.id) == {"learning_rate": 1e-3}, "what the recipe gave, without defaults"
    assert runs.rows(owner="anna") == []


def test_a_run_of_another_terminal_runs_while_it_writes_and_is_lost_when_it_falls_silent(
    runs: Runs, room: Path
) -> None:
    run = write_run(room / "run", status="running")
    row = runs.row(run_id(run))
    assert row.state == "running"
    assert row.seconds_left == pytest.approx((10 - 3) / 2.0)
    old = time.time() - 3600
    for name in ("run.json", "metrics.jsonl"):
        os.utime(run / name, (old, old))
    row = runs.row(run_id(run))
    assert (row.state, row.seconds_left, row.can_resume) == ("lost", None, True)


def test_damaged_and_hostile_run_files_are_passed_over(runs: Runs, room: Path) -> None:
    for name, text in {"a": "{", "b": "[1]", "c": '{"config": 5, "started": [], "total_steps": "x"}'}.items():
        (room / name).mkdir()
        (room / name / "run.json").write_text(text)
    (room / "loop").symlink_to(room)
    rows = runs.rows()
    assert [(row.id, row.state, row.total_steps) for row in rows] == [(run_id(room / "c"), "lost", 0)]
    with pytest.raises(ConfigError):
        runs.get("run-../../etc")


def test_a_name_is_kept_in_a_file_and_no_folder_moves(runs: Runs, jobs: Jobs, room: Path) -> None:
    run = write_run(room / "run")
    before = sorted(path for path in room.rglob("*") if "webui" not in path.parts)
    assert runs.rename(run_id(run), "  my\tbest \x00 模型 ") == "my best 模型"
    assert runs.row(run_id(run)).name == "my best 模型"
    assert sorted(path for path in room.rglob("*") if "webui" not in path.parts) == before
    assert json.loads((jobs.root / FILE).read_text()) == {str(run): "my best 模型"}
    runs.rename(run_id(run), "")
    assert runs.row(run_id(run)).name == ""
    with pytest.raises(ConfigError, match="characters long"):
        runs.rename(run_id(run), "x" * (MAX_NAME + 1))


def test_a_damaged_file_of_names_is_as_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[")
    names = RunNames(tmp_path)
    assert names.all() == {}
    names.rename("key", "name")
    assert names.get("key") == "name"


def test_a_found_run_is_resumed_as_a_job_with_its_recipe_in_its_folder(runs: Runs, room: Path, stand: Stand) -> None:
    run = write_run(
        room / "run",
        "stopped",
        model_name_or_path="model",
        train_dataset_path=["data.jsonl"],
        overwrite_output_dir=True,
    )
    job = runs.resume(run_id(run), "anna")
    assert (job.command, job.owner, job.output_dir) == ("train", "anna", str(run))
    assert "overwrite_output_dir" not in job.recipe.read_text()
    assert [row.id for row in runs.rows()] == [job.id], "one run, not two"


def test_adapters_and_whole_models_are_told_apart(tmp_path: Path) -> None:
    for name in ("adapter", "model", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "model" / "model.safetensors").touch()
    kinds = {name: kind_of(tmp_path / name) for name in ("adapter", "model", "empty", "nothing")}
    assert (kinds["adapter"].adapter, kinds["adapter"].weights, kinds["adapter"].base) == (True, True, "some/base")
    assert (kinds["model"].adapter, kinds["model"].weights) == (False, True)
    assert kinds["empty"] == kinds["nothing"]
    assert not kinds["empty"].weights


def test_the_time_left_follows_the_last_steps_and_not_the_slow_first_one() -> None:
    rates = MetricSeries(list(range(1, 42)), [0.01] + [4.0] * 40)
    assert time_left({"interval_steps_per_second": rates}, 41, 81) == pytest.approx(10.0)
    assert time_left({}, 1, 10) is None
    assert time_left({"interval_steps_per_second": rates}, 41, 0) is None
