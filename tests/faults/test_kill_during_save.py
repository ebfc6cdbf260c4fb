"""kill -9 at random times and at every system call of a save: nothing published is lost or torn, no loss differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from erniekit.checkpoint import manifest
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.errors import CheckpointError
from faults.results import fault

pytestmark = pytest.mark.xdist_group("kills")  # one server, not one for each worker

SERVER = Path(__file__).with_name("kill_server.py")

# Saves without end; each is slow enough (20 files) for a kill to land inside one.
TRAINER = """
import sys
from pathlib import Path
from erniekit.checkpoint.manager import CheckpointManager
def write(folder):
    for i in range(20):
        (folder / str(i)).write_bytes(bytes(50_000))
with CheckpointManager(Path(sys.argv[1])) as manager:
    step = 0
    while True:
        step += 1
        manager.save(step, write)
        print(step, flush=True)
"""


def run_server(folder: Path, kills: int, inside: int) -> dict:
    seed = os.environ.get("FAULT_SEED", str(time.time_ns() % 1_000_000))
    options = [str(folder), "--kills", str(kills), "--inside", str(inside), "--seed", seed]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SERVER), *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"FAULT_SEED={seed}\n{done.stderr[-3000:]}"
    return {"FAULT_SEED": seed, **json.loads((folder / "result.json").read_text())}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """One warm server for both tests: importing torch and its optimisers takes longer than thirty kills."""
    return run_server(tmp_path_factory.mktemp("kills"), kills=30, inside=10)


def judge_random_kills(results: dict, kills: int, inside: int) -> None:
    result, story = results["random"], str(results)
    with fault("K1", f"kill -9 at {kills} random times, one process, saves in front and behind") as row:
        row.count = row.hits = result["kills"]
        row.lost, row.torn, row.differing = (len(result[kind]) for kind in ("lost", "torn", "different"))
        row.seconds = results["seconds"]["random"]
        row.note = f"{result['inside']} inside a save, {result['losses_compared']} losses compared"
        assert result["lost"] == [], story
        assert result["torn"] == [], story
        assert result["different"] == [], story
        # the faults happened, and where they hurt
        assert result["kills"] >= kills, story
        assert result["inside"] >= inside, story
        assert result["inside_background"] > 0, story
        assert result["stale_locks"] >= kills // 2, story
        assert result["runs_completed"] >= kills // 20, story
        assert result["losses_compared"] > 30 * result["runs_completed"], story


def test_thirty_kills_at_random_times_lose_no_checkpoint_and_change_no_loss(results):
    judge_random_kills(results, kills=30, inside=10)


@pytest.mark.full
def test_six_hundred_kills_at_random_times_lose_no_checkpoint_and_change_no_loss(tmp_path):
    judge_random_kills(run_server(tmp_path, kills=600, inside=200), kills=600, inside=200)


def test_a_kill_at_any_call_of_a_save_leaves_the_old_checkpoint_or_the_new(results):
    result = results["calls"]
    with fault("K2", "kill -9 at every call of a first save, a later one, a repeated one and a start") as row:
        row.count = sum(case["points"] for case in result["points"].values())
        row.hits = sum(case["kills"] for case in result["points"].values())
        row.lost, row.torn, row.differing = (len(result[kind]) for kind in ("wrong", "torn", "different"))
        row.seconds = results["seconds"]["calls"]
        row.note = f"{result['resumed']} resumed, from the old checkpoint or the new"
        for kind in ("wrong", "torn", "different", "left"):
            assert result[kind] == [], result
        for name, case in result["points"].items():
            assert case["kills"] == case["points"] >= case["calls"], (name, case)  # every single point was hit
        assert result["points"]["first save"]["calls"] >= 15
        assert result["points"]["later save, with rotation"]["calls"] >= 20
        assert result["resumed"] == row.count


def test_a_second_trainer_is_refused_until_the_first_is_killed_and_then_takes_over(tmp_path):
    inside = trial = 0
    while trial < 4 or (not inside and trial < 40):  # they do nothing but save, and no moment is sure to be inside one
        with subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout is not None
            saved = [int(first.stdout.readline()) for _ in range(3)][-1]
            for _ in range(3):
                with pytest.raises(CheckpointError, match=f"pid {first.pid} on "):
                    CheckpointManager(tmp_path).start()
            time.sleep(0.004 * (trial % 4))
            first.send_signal(signal.SIGKILL)
        trial += 1
        inside += any(path.name.startswith((".tmp-", ".del-", ".old-")) for path in tmp_path.iterdir())
        with CheckpointManager(tmp_path) as second:
            newest = second.latest_good()
            assert newest is not None
            assert manifest.load(newest).info["step"] >= saved
            assert not [path for path in tmp_path.iterdir() if path.name.startswith((".tmp-", ".del-", ".old-"))]
            for path in second.list():
                manifest.check(path)
    assert inside >= 1
