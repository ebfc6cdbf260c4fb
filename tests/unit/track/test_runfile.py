"""run.json: always whole, up to date at each event, and one story across resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from erniekit.files import own
from erniekit.track import make_trackers
from erniekit.track import runfile as run_file
from erniekit.track.atomic import plain
from erniekit.track.runfile import RunRecord, read, record_text


def started(folder, start_step=0):
    record = RunRecord(folder, command=["erniekit", "train", "my recipe.yaml"], version="0.1")
    record.describe(config=[{"key": "max_steps", "value": 4, "origin": "command line"}])
    trackers = make_trackers([], folder, disable_tqdm=True, record=record)
    trackers.start(total_steps=4, start_step=start_step)
    return record, trackers


def test_the_file_holds_what_was_described_and_every_event_at_once(tmp_path):
    record, trackers = started(tmp_path)
    record.describe(
        notes=[{"key": "a", "old": 1, "new": 2, "reason": "b"}],
        environment={"python": "3.11"},
        data={"rows": np.int64(12), "lengths": np.array([1, 2])},
        coverage=[{"module": "qkv", "matched": 3}],
    )
    trackers.log(2, {"loss": 1.5})
    trackers.event(2, "save", "checkpoint-2")
    story = read(tmp_path)
    assert story["command"] == "erniekit train 'my recipe.yaml'"
    assert story["config"] == [{"key": "max_steps", "value": 4, "origin": "command line"}]
    assert story["data"] == {"rows": 12, "lengths": [1, 2]}
    assert (story["status"], story["total_steps"]) == ("running", 4)
    assert [(event["step"], event["name"], event["text"]) for event in story["events"]] == [(2, "save", "checkpoint-2")]
    assert story["latest"]["train"] == {"global_step": 2, "loss": 1.5}
    assert "finished" not in story


def test_a_finished_run_has_its_metrics_and_next_commands(tmp_path):
    record, trackers = started(tmp_path)
    trackers.log(4, {"train_loss": 1.5, "train_runtime": math.inf}, "end")
    record.finish(metrics={"eval_loss": 2.0}, next_commands=["erniekit chat out"])
    trackers.close()
    story = read(tmp_path)
    assert story["status"] == "finished"
    assert story["metrics"] == {"train_loss": 1.5, "train_runtime": None, "eval_loss": 2.0}
    assert story["next_commands"] == ["erniekit chat out"]


def test_a_run_closed_without_its_end_was_stopped(tmp_path):
    started(tmp_path)[1].close()
    assert read(tmp_path)["status"] == "stopped"


def test_a_resume_keeps_the_events_before_it_and_a_fresh_run_does_not(tmp_path):
    _, trackers = started(tmp_path)
    trackers.event(0, "start", "fresh")
    trackers.event(3, "save", "checkpoint-3")
    first = read(tmp_path)
    _, trackers = started(tmp_path, start_step=3)  # the first one was killed: never closed
    trackers.event(3, "resume", "from checkpoint-3")
    story = read(tmp_path)
    assert [event["name"] for event in story["events"]] == ["start", "save", "resume"]
    assert story["started"] == first["started"]
    assert (story["start_step"], story["status"]) == (3, "running")
    _, trackers = started(tmp_path)
    trackers.event(0, "start", "overwritten")
    assert [event["text"] for event in read(tmp_path)["events"]] == ["overwritten"]


def test_the_newest_events_are_kept_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "MAX_EVENTS", 5)
    _, trackers = started(tmp_path)
    for step in range(1, 9):
        trackers.event(step, "save", "")
    story = read(tmp_path)
    assert [event["step"] for event in story["events"]] == [4, 5, 6, 7, 8]
    assert story["events_dropped"] == 3


def test_a_failed_write_leaves_the_old_file_whole_and_no_litter(tmp_path, monkeypatch):
    record, _ = started(tmp_path)
    before = (tmp_path / "run.json").read_text()

    def torn(source, target):
        raise OSError("disk is gone")

    monkeypatch.setattr("os.replace", torn)
    try:
        record.event(1, "save", "x")
    except OSError:
        pass
    assert (tmp_path / "run.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".erniekit-files", "metrics.jsonl", "run.json"]


def test_a_damaged_run_file_reads_as_empty(tmp_path):
    own(tmp_path / "run.json").write_text('{"config": [')
    assert read(tmp_path) == {}
    record = RunRecord(tmp_path, command="x", version="0")
    record.describe()
    assert json.loads((tmp_path / "run.json").read_text())["command"] == "x"


def test_the_file_is_json_with_a_line_for_each_item():
    record = {"status": "it \"runs\"", "config": [{"key": "a", "value": float("nan")}, {"key": "ü", "value": (1, 2)}],
              "metrics": {"loss": 1.5, 3: Path("x")}, "events": [], "none": {}, "seed": 7}  # fmt: skip
    text = record_text(record)
    assert json.loads(text) == plain(record)
    assert '    {"key": "ü", "value": [1, 2]}\n' in text
    assert '    "loss": 1.5,\n' in text
