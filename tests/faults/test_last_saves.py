"""The save at a run's end and the folder it goes into: a signal or a kill within it, and a second run beside it.
rank_runs.py starts the ranks, rank_faults.py harms."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from erniekit.checkpoint import manifest
from faults.rank_runs import TIMEOUT, TP, RankServer, curve
from faults.results import fault

pytestmark = pytest.mark.xdist_group("faults")  # in turn: they share a server, and their limits are in seconds

WITHOUT = dict(save_strategy="no", max_steps=3, **TP)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.full
def test_a_signal_within_the_final_save_ends_with_that_save_and_the_model(server: RankServer, rank: int) -> None:
    run, at = f"t2-end-{rank}", dict(at="file", call=5) if rank == 0 else dict(at="answer", call=2)
    with fault("T2", "SIGTERM to one rank of two within the save at the end of a run without checkpoints") as row:
        ended = server.run(run, faults=[dict(rank=rank, step=3, do="term", **at)], **WITHOUT)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert ended.codes == [0, 0], ended.story()
        manifest.check(server.folder / run / "checkpoint-3")
        assert (server.folder / run / "model.safetensors").is_file()


@pytest.mark.full
def test_a_kill_within_the_only_save_says_that_nothing_is_there_and_the_run_begins_again(server: RankServer) -> None:
    folder = server.folder / "k5-only"
    with fault("K5", "kill -9 of one rank of two within the only save of a run") as row:
        ended = server.run("k5-only", faults=[dict(rank=1, step=3, at="answer", do="kill", call=2)], **WITHOUT)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert ended.codes == [1, -signal.SIGKILL], ended.story()
        assert "error: rank 1 ended while checkpoint-3 was being saved" in ended.said(0)
        assert f"where: {folder}: no whole checkpoint there yet" in ended.said(0)
        assert "then start again with the same command: erniekit train " in ended.said(0)
        again = server.run("k5-only", **WITHOUT)
        assert again.codes == [0, 0], again.story()
        assert again.steps(0) == [1, 2, 3], again.story()


@pytest.mark.full
def test_a_second_run_into_the_folder_is_refused_and_the_first_goes_on_undisturbed(server: RankServer) -> None:
    keys = dict(max_steps=60, save_total_limit=100, **TP)
    folder = server.folder / "first"
    first = server.start("first", **keys)
    wait_for(folder / "checkpoint-2")
    second = server.run("first", overwrite_output_dir=True, **keys)
    assert not first.ends, "it was still at work"
    assert second.codes == [2, 1], second.story()
    assert f"error: another run is training into this folder: pid {first.pids[0]} on " in second.said(0)
    assert "error: rank 0 ended while the run was being prepared" in second.said(1)
    assert "Traceback" not in second.said(1)
    ended = first.wait()
    assert ended.codes == [0, 0], ended.story()
    assert [step for step, _ in curve(folder)] == list(range(1, 61))
    assert not list(folder.glob("*.aside-*"))
    for step in range(2, 61, 2):
        manifest.check(folder / f"checkpoint-{step}", "size")


def wait_for(path: Path) -> None:
    until = time.monotonic() + TIMEOUT
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.01)
