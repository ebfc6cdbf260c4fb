"""Checkpoints in which a rank's states are two files: a rank that dies within a save, a second file that is damaged or
finds no space, and layouts that read them. rank_runs.py starts the ranks, rank_faults.py harms."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.checkpoint.manager import CheckpointManager
from faults.rank_runs import ASYNC, FSDP, PP, TP, Ended, RankServer, Reference, curve, judge, undisturbed
from faults.results import fault

pytestmark = pytest.mark.xdist_group("faults")  # in turn: they share a server, and their limits are in seconds

LAST = 6
ONE: dict[str, Any] = dict(max_steps=LAST, **TP)
TWO: dict[str, Any] = dict(two_files=True, **ONE)
FIRST, SECOND = (f"optimizer-rank-00001-of-00002{more}.safetensors" for more in ("", "-part-2"))
OF_RANK_0 = SECOND.replace("00001-of", "00000-of")


@pytest.fixture(scope="module")
def two(server: RankServer) -> Reference:
    """Two ranks of tensor parallelism with two files each, which nobody disturbs."""
    reference = undisturbed(server, "two-files", **TWO)
    files = {path.name for path in (reference.folder / f"checkpoint-{LAST}").iterdir()}
    assert {FIRST, SECOND, OF_RANK_0} <= files
    return reference


# --- a rank that dies within a save


def told_in_three_lines(ended: Ended, rank: int, lost: str, step: int, folder: Path, whole: str) -> None:
    said = ended.said(rank)
    story = ended.story()
    what, where, fix = re.findall(r"^(?:error|where|fix): .*$", said, re.MULTILINE)
    assert what == f"error: {lost} ended while checkpoint-{step} was being saved", story
    assert where == f"where: {folder}: {whole} is the newest whole checkpoint", story
    assert re.search(rf"resume from {whole} with the same command: erniekit train .*output_dir={folder} ", fix), story
    assert "Traceback" not in said, story
    assert "gloo" not in said, story


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rank", "at", "keys"),
    [
        ("written", 1, dict(at="part"), {}),
        ("written-async", 1, dict(at="part"), ASYNC),
        ("between", 1, dict(at="file", call=3), {}),
        ("before", 1, dict(at="save"), {}),
        pytest.param("asked", 1, dict(at="answer", call=2), {}, marks=pytest.mark.full),
        ("writer", 0, dict(at="file", call=9), {}),
    ],
)
def test_a_rank_killed_within_a_save_is_named_with_the_whole_checkpoint_and_the_way_on(
    server: RankServer, two: Reference, name: str, rank: int, at: dict[str, Any], keys: dict[str, Any]
) -> None:
    run, other = f"k5-{name}", 1 - rank
    with fault("K5", "kill -9 of one rank of two within a save: what the other says, and the run again") as row:
        ended = server.run(run, faults=[dict(rank=rank, step=4, do="kill", **at)], **TWO, **keys)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert ended.codes[rank] == -signal.SIGKILL, ended.story()
        assert ended.codes[other] == 1, ended.story()
        told_in_three_lines(ended, other, f"rank {rank}", 4, server.folder / run, "checkpoint-2")
        judge(row, two, server.folder / run, [ended], finished=False)
        again = server.run(run, **TWO, **keys)
        judge(row, two, server.folder / run, [ended, again], finished=True)


@pytest.mark.full
def test_of_three_ranks_both_that_are_left_name_the_one_that_died(server: RankServer) -> None:
    with fault("K5", "kill -9 of one rank of three within a save") as row:
        keys = dict(data_parallel_degree=3, two_files=True, max_steps=LAST)
        ended = server.run("k5-three", 3, [dict(rank=1, step=4, at="part", do="kill")], **keys)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert ended.codes == [1, -signal.SIGKILL, 1], ended.story()
        for rank in (0, 2):
            told_in_three_lines(ended, rank, "rank 1", 4, server.folder / "k5-three", "checkpoint-2")


def killed_at(server: RankServer, two: Reference, row: Any, rank: int, call: int) -> bool:
    """False: the save has no such call."""
    run = f"k5-{rank}-{call}"
    ended = server.run(run, faults=[dict(rank=rank, step=4, at="file", do="kill", call=call)], **TWO)
    if not ended.faults():
        return False
    row.count, row.hits = row.count + 1, row.hits + (ended.codes[rank] == -signal.SIGKILL)
    assert "Traceback" not in ended.said(1 - rank), ended.story()
    assert "a fault of erniekit" not in ended.said(1 - rank), ended.story()
    whole = CheckpointManager(server.folder / run).list()
    assert [p.name for p in whole] in (["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]), ended.story()
    again = server.run(run, **TWO)
    judge(row, two, server.folder / run, [ended, again], finished=True)
    assert not list((server.folder / run).glob(".tmp-*")), "swept"
    return True


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_any_change_of_the_disk_of_a_save_in_two_files_loses_nothing(
    server: RankServer, two: Reference, rank: int
) -> None:
    with fault("K5", f"kill -9 at each change of the disk that rank {rank} of two makes in a save") as row:
        calls = next(call for call in range(1, 200) if not killed_at(server, two, row, rank, call))
        assert row.hits == row.count == calls - 1
        assert calls > 10, "two files are created, written and synced"


# --- a second file that is damaged


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    other, aside = path.with_name(OF_RANK_0), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lead_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def be_the_first(path: Path) -> None:
    shutil.copyfile(path.with_name(FIRST), path)


@pytest.fixture(scope="module")
def stopped(server: RankServer) -> Path:
    return killed_in_step_5(server, "stopped", **TWO)


def killed_in_step_5(server: RankServer, run: str, **keys: Any) -> Path:
    ended = server.run(run, faults=[dict(rank=0, step=5, at="update", do="kill")], **keys)
    folder = server.folder / run
    assert [path.name for path in CheckpointManager(folder).list()] == ["checkpoint-2", "checkpoint-4"], ended.story()
    return folder


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, f"{SECOND} has "),
        pytest.param(Path.unlink, f"{SECOND} is missing", marks=pytest.mark.full),
        (flip, f"{SECOND} does not match its sha256"),
        pytest.param(swap, f"{OF_RANK_0} has ", marks=pytest.mark.full),
        pytest.param(be_a_folder, f"{SECOND} is not a plain file", marks=pytest.mark.full),
        pytest.param(lead_nowhere, f"{SECOND} is not a plain file", marks=pytest.mark.full),
        pytest.param(be_a_pipe, f"{SECOND} is not a plain file", marks=pytest.mark.full),
        pytest.param(be_the_first, f"{SECOND} has ", marks=pytest.mark.full),
    ],
)
def test_a_damaged_second_file_is_named_and_the_run_goes_on_from_the_checkpoint_before(
    server: RankServer, two: Reference, stopped: Path, harm: Callable[[Path], None], said: str
) -> None:
    run = f"c5-{harm.__name__}"
    folder = shutil.copytree(stopped, server.folder / run)
    with fault("C1", "the second file of a rank is damaged in any of 8 ways; the same command again") as row:
        harm(folder / "checkpoint-4" / SECOND)
        again = server.run(run, **TWO)
        row.count = 1
        row.hits = again.said(0).count(f"warning: checkpoint-4 is damaged and will not be used: {said}")
        assert row.hits == 1, again.story()
        assert again.steps(0)[0] == 3, "from checkpoint-2"
        assert (folder / "checkpoint-4.corrupt-1").is_dir(), "kept for its owner"
        judge(row, two, folder, [again], finished=True)


@pytest.mark.full
def test_a_damaged_checkpoint_that_was_asked_for_is_refused_with_the_one_before_it(
    server: RankServer, stopped: Path
) -> None:
    folder = shutil.copytree(stopped, server.folder / "c5-named")
    flip(folder / "checkpoint-4" / SECOND)
    ended = server.run("c5-named", resume_from_checkpoint=folder / "checkpoint-4", **TWO)
    assert ended.codes == [2, 2], ended.story()
    for rank in (0, 1):
        assert f"error: {SECOND} does not match its sha256" in ended.said(rank)
        assert f"or resume from the one before: resume_from_checkpoint={folder}/checkpoint-2" in ended.said(rank)
    assert (folder / "checkpoint-4").is_dir(), "nothing is renamed for a question"


# --- a disk that is full for one of them


@pytest.mark.full
@pytest.mark.parametrize("call", [2, 5])
def test_a_disk_that_is_full_for_one_file_of_a_rank_costs_that_save_alone(
    server: RankServer, two: Reference, call: int
) -> None:
    run = f"d5-{call}"
    with fault("D1", "disk full on rank 1 within its two files") as row:
        faults = [dict(rank=1, step=4, at="file", do="fail", code=errno.ENOSPC, call=call)]
        ended = server.run(run, faults=faults, **TWO)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert "NOT SAVED: rank 1: checkpoint-4 was not written: No space left on device" in ended.said(0)
        assert ended.said(0).count("CHECKPOINT NOT SAVED") == 1, ended.story()
        judge(row, two, server.folder / run, [ended], finished=True)


@pytest.mark.full
def test_a_limit_on_a_files_size_ends_the_run_with_what_to_do(server: RankServer, two: Reference) -> None:
    with fault("D1", "rank 1 may write no file as large as its second one") as row:
        ended = server.run("d5-limit", faults=[dict(rank=1, step=4, at="file", do="full", call=1)], **TWO)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert ended.codes == [2, 2], ended.story()
        for rank in (0, 1):
            assert "error: rank 1: checkpoint-6 was not written: File too large" in ended.said(rank)
            assert "ulimit -f" in ended.said(rank)
        judge(row, two, server.folder / "d5-limit", [ended], finished=False)
        again = server.run("d5-limit", **TWO)
        assert again.steps(0)[0] == 3, "from checkpoint-2"
        judge(row, two, server.folder / "d5-limit", [ended, again], finished=True)


# --- other layouts


@pytest.fixture(scope="module")
def in_one_file(server: RankServer) -> Path:
    return killed_in_step_5(server, "stopped-one", **ONE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (1, dict(gradient_accumulation_steps=2)),
        pytest.param(2, FSDP, marks=pytest.mark.full),
        pytest.param(2, PP, marks=pytest.mark.full),
    ],
)
def test_another_layout_reads_two_files_as_it_reads_one(
    server: RankServer, stopped: Path, in_one_file: Path, ranks: int, keys: dict[str, Any]
) -> None:
    later = []
    for source in (stopped, in_one_file):
        run = f"r2-{source.name}-{ranks}-{next(iter(keys))}"
        shutil.copytree(source, server.folder / run)
        ended = server.run(run, ranks, max_steps=LAST, **keys)
        assert set(ended.codes) == {0}, ended.story()
        assert ended.steps(0) == [5, 6], ended.story()
        later.append(curve(server.folder / run)[-2:])
    assert later[0] == later[1]
