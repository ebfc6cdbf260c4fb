"""VisualDL and W&B are too big to install for tests: a stand-in with their few calls records what we send."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from erniekit.config import load
from erniekit.recipes.session import Session
from erniekit.recipes.training import trackers_for
from erniekit.track import make_trackers
from erniekit.track.runfile import RunRecord

VISUALDL = """
import json
class LogWriter:
    def __init__(self, logdir):
        import os
        os.makedirs(logdir, exist_ok=True)
        self.out = open(logdir + "/sent.jsonl", "a")
    def add_scalar(self, tag, value, step, walltime=None):
        self.out.write(json.dumps([tag, value, step]) + "\\n")
    def add_text(self, tag, text_string, step=None, walltime=None):
        self.out.write(json.dumps([tag, text_string, step]) + "\\n")
    def close(self):
        self.out.close()
"""

WANDB = """
import os
started = []
class Run:
    def __init__(self, **asked):
        self.asked, self.sent, self.axes, self.id, self.done = asked, [], [], asked["id"] or "abc123", False
        self.variables = {name: text for name, text in os.environ.items() if name.startswith("WANDB_")}
    def define_metric(self, name, step_metric=None, step_sync=None):
        self.axes.append((name, step_metric))
    def log(self, numbers):
        self.sent.append(numbers)
    def finish(self):
        self.done = True
def init(*, project, name, id, resume, dir, config):
    started.append(Run(project=project, name=name, id=id, resume=resume, dir=dir, config=config))
    return started[-1]
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    def put(name, source):
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield put
    for name in ("visualdl", "wandb"):
        sys.modules.pop(name, None)


def test_visualdl_gets_the_tags_its_board_reads(tmp_path, stand_in):
    stand_in("visualdl", VISUALDL)
    trackers = make_trackers(["visualdl"], tmp_path, tmp_path / "vdl_log", disable_tqdm=True)
    trackers.start(1)
    trackers.log(1, {"loss": 2.5})
    trackers.log(1, {"eval_loss": 1.5}, "eval")
    trackers.event(1, "save", "checkpoint-1")
    trackers.close()
    sent = [json.loads(line) for line in (tmp_path / "vdl_log" / "sent.jsonl").read_text().splitlines()]
    assert sent == [
        ["train/loss", 2.5, 1],
        ["train/global_step", 1.0, 1],
        ["eval/loss", 1.5, 1],
        ["train/global_step", 1.0, 1],
        ["events/save", "checkpoint-1", 1],
    ]


def test_wandb_plots_against_our_step_and_a_resume_goes_on_with_the_same_run(tmp_path, stand_in, monkeypatch):
    wandb = stand_in("wandb", WANDB)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for start in (0, 1):
        trackers = make_trackers(["wandb"], tmp_path / "out", config={"lr": 1e-5}, disable_tqdm=True)
        trackers.start(2, start_step=start)
        trackers.log(start + 1, {"loss": 2.5})
        trackers.close()
    first, second = wandb.started
    assert first.asked["project"] == "mine"
    assert first.asked["name"] == "out"
    assert first.asked["config"] == {"lr": 1e-5}
    assert (first.asked["id"], second.asked["id"]) == (None, "abc123")
    assert second.asked["resume"] == "allow"
    assert ("*", "train/global_step") in first.axes
    assert second.sent == [{"train/loss": 2.5, "train/global_step": 2.0}]
    assert first.done
    assert second.done


def test_wandb_is_started_with_the_key_and_the_proxy_of_the_run_and_neither_is_in_its_config(
    tmp_path, stand_in, monkeypatch
):
    wandb = stand_in("wandb", WANDB)
    monkeypatch.setenv("WANDB_API_KEY", "of the shell")
    for name in ("WANDB_HTTP_PROXY", "WANDB_HTTPS_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    for words in ([], ["wandb_api_key=hush", "wandb_http_proxy=http://me:hush@proxy:3128"]):
        cfg = load(["report_to=wandb", "disable_tqdm=1", *words])
        record = RunRecord(tmp_path / "out", command="erniekit train", version="1")
        trackers = trackers_for(cfg, tmp_path / "out", record, Session())
        trackers.start(1)
        trackers.close()
    plain, given = wandb.started
    assert plain.variables["WANDB_API_KEY"] == "of the shell"
    assert "WANDB_HTTP_PROXY" not in plain.variables
    assert given.variables["WANDB_API_KEY"] == "hush"
    assert given.variables["WANDB_HTTP_PROXY"] == given.variables["WANDB_HTTPS_PROXY"] == "http://me:hush@proxy:3128"
    assert "hush" not in str(given.asked)
    assert "hush" not in "".join(file.read_text() for file in (tmp_path / "out").rglob("*") if file.is_file())
