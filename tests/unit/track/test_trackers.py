"""make_trackers and the fan-out: names, missing packages, and a failing tracker that costs only itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from erniekit.errors import ConfigError, Preempted
from erniekit.track import RunInfo, Tracker, Trackers, make_trackers
from erniekit.track.base import default_logging_dir, tag
from erniekit.track.runfile import RunRecord


class Recorder(Tracker):
    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def log(self, step, metrics, kind):
        self.calls.append((step, dict(metrics), kind))

    def event(self, step, name, text):
        self.calls.append((step, name, text))

    def close(self):
        self.calls.append(("close",))


class Failing(Tracker):
    name = "failing"
    closed = False

    def log(self, step, metrics, kind):
        raise OSError("disk is full")

    def close(self):
        self.closed = True


def test_a_tracker_that_raises_is_reported_once_and_the_others_go_on(tmp_path, capsys):
    failing, recorder = Failing(), Recorder()
    trackers = Trackers([failing, recorder], RunInfo(tmp_path))
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert [call[0] for call in recorder.calls] == [1, 2, 3, "close"]
    assert failing.closed
    warnings = capsys.readouterr().err
    assert warnings.count("failing tracker is off") == 1
    assert "disk is full" in warnings


def test_a_stop_signal_inside_a_tracker_is_not_swallowed(tmp_path):
    class Interrupted(Tracker):
        def log(self, step, metrics, kind):
            raise Preempted

    with pytest.raises(Preempted):
        Trackers([Interrupted()], RunInfo(tmp_path)).log(1, {"loss": 1.0})


def test_metrics_reach_trackers_as_floats_without_unknown_ones(tmp_path):
    recorder = Recorder()
    trackers = Trackers([recorder], RunInfo(tmp_path))
    trackers.log(7, {"global_step": 7, "loss": 1, "mfu": None}, "eval")
    assert recorder.calls == [(7, {"loss": 1.0}, "eval")]
    assert isinstance(recorder.calls[0][1]["loss"], float)


def test_every_run_has_console_and_jsonl_and_none_adds_nothing(tmp_path):
    assert make_trackers(["none"], tmp_path).names == ["jsonl", "console"]
    assert make_trackers([], tmp_path).names == ["jsonl", "console"]
    assert make_trackers(["console", "tensorboard", "tensorboard"], tmp_path).names == [
        "jsonl",
        "console",
        "tensorboard",
    ]


def test_all_takes_the_trackers_whose_packages_import(tmp_path):
    installed = [name for name in ("tensorboard", "visualdl", "wandb") if importlib.util.find_spec(name)]
    assert make_trackers(["all"], tmp_path).names == ["jsonl", "console", *installed]


@pytest.mark.parametrize("name", ["visualdl", "wandb", "tensorboard"])
def test_a_missing_package_names_the_extra_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # what an absent package looks like to `import`
    for module in [loaded for loaded in sys.modules if loaded.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ConfigError) as error:
        make_trackers([name], tmp_path)
    assert f"erniekit-torch[{name}]" in error.value.fix
    assert error.value.where == "report_to"
    assert make_trackers([name], tmp_path, explicit=False).names == ["jsonl", "console"]


def test_an_unknown_tracker_gets_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match="report_to") as error:
        make_trackers(["tensorbord"], tmp_path)
    assert "tensorboard" in error.value.fix


def test_other_ranks_track_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    record = RunRecord(tmp_path, command="x", version="0")
    record.describe(data={"rows": 1})
    trackers = make_trackers(["tensorboard"], tmp_path, record=record)
    trackers.start(3)
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    assert trackers.names == []
    assert list(tmp_path.iterdir()) == []


def test_tags_are_those_erniekit_tools_read():
    assert tag("loss") == "train/loss"
    assert tag("eval_loss") == "eval/loss"
    assert tag("train_runtime") == "train/train_runtime"
    assert tag("rewards/margins") == "train/rewards/margins"
    assert tag("eval_rewards/margins") == "eval/rewards/margins"


def test_a_resumed_run_logs_on_in_the_newest_folder(tmp_path):
    first = default_logging_dir(tmp_path, resuming=True)
    assert first.parent == tmp_path / "runs"
    first.mkdir(parents=True)
    assert default_logging_dir(tmp_path, resuming=True) == first


def test_nothing_heavy_is_imported_before_it_is_asked_for(tmp_path):
    code = (
        "import sys, json\n"
        "from erniekit.track import make_trackers\n"
        "from erniekit.track import report, results, runfile\n"
        f"trackers = make_trackers(['none'], {str(tmp_path)!r})\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'tensorboard') if name in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == []
