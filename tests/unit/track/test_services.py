"""SwanLab, MLflow and Trackio as they are installed: what a run sends is read back from their files, offline.

`make test-full` runs these where the package is installed (extras swanlab, mlflow, trackio).
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from erniekit.errors import ConfigError
from erniekit.track import make_trackers

SERVICES = {"swanlab": "swanlab", "mlflow": "mlflow", "trackio": "trackio"}


def is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_stops_the_run_with_the_command_that_installs_it(name: str, tmp_path: Path):
    if is_installed(SERVICES[name]):
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ConfigError, match=f"report_to: {name} needs a package") as stopped:
        make_trackers([name], tmp_path)
    assert f'pip install "erniekit-torch[{name}]"' in stopped.value.fix
    assert make_trackers([name], tmp_path, explicit=False).names == ["jsonl", "console"]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No login, no server, no home with either; every store below the test's folder."""
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_ROOT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def run_twice(name: str, folder: Path) -> None:
    """Two steps, then one more after a resume."""
    for start, losses in ((0, (2.5, 2.0)), (2, (1.5,))):
        keys = {"learning_rate": 1e-5, "train_dataset_path": ["a.jsonl"]}
        trackers = make_trackers([name], folder / "out", folder / "logs", config=keys, disable_tqdm=True)
        trackers.start(3, start_step=start)
        for at, loss in enumerate(losses, start + 1):
            trackers.log(at, {"loss": loss})
        trackers.log(start + len(losses), {"eval_loss": 1.0}, "eval")
        assert name in trackers.names, "it was switched off"
        trackers.close()


@pytest.mark.full
def test_mlflow_keeps_one_run_with_every_step_and_the_keys(alone: Path):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install erniekit-torch[mlflow]")
    run_twice("mlflow", alone)
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(alone / "logs" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("erniekit")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "out"
    assert run.info.status == "FINISHED"
    assert run.info.run_id == (alone / "out" / "mlflow_run_id").read_text().strip()
    assert run.data.params["learning_rate"] == "1e-05"
    steps = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == [(1, 2.5), (2, 2.0), (3, 1.5)]
    assert run.data.metrics["eval/loss"] == 1.0
    assert not (alone / "home").exists()  # nothing about this machine is collected or sent


@pytest.mark.full
def test_trackio_keeps_one_run_with_every_step(alone: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trackio", reason="trackio is not installed: pip install erniekit-torch[trackio]")
    run_twice("trackio", alone)
    with sqlite3.connect(alone / "trackio" / "erniekit.db") as store:
        rows = store.execute("select run_id, run_name, step, metrics from metrics order by step").fetchall()
    assert {name for _, name, _, _ in rows} == {"out"}
    assert len({run for run, _, _, _ in rows}) == 1
    losses = {step: json.loads(sent).get("train/loss") for _, _, step, sent in rows if b"train/loss" in bytes(sent)}
    assert losses == {1: 2.5, 2: 2.0, 3: 1.5}
    assert "Trackio" not in capsys.readouterr().out


@pytest.mark.full
def test_swanlab_goes_on_with_the_same_run_offline(alone: Path):
    pytest.importorskip("swanlab", reason="swanlab is not installed: pip install erniekit-torch[swanlab]")
    run_twice("swanlab", alone)
    run_id = (alone / "out" / "swanlab_run_id").read_text().strip()
    stored = sorted((alone / "logs" / "swanlab").rglob("*.swanlab"))
    assert stored
    assert {path.name for path in stored} == {f"run-{run_id}.swanlab"}
    assert b"train/loss" in b"".join(path.read_bytes() for path in stored)
    assert not (alone / "home" / ".swanlab" / ".netrc").exists()
