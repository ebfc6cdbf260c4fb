"""An adapter that all ranks write into one file: one that dies or has no space within it costs that save alone.
rank_runs.py starts the ranks, rank_faults.py harms."""

from __future__ import annotations

import errno
import signal
from typing import Any

import pytest

from erniekit.checkpoint.manager import CheckpointManager
from faults.rank_runs import TP, RankServer, Reference, judge, undisturbed
from faults.results import fault

pytestmark = pytest.mark.xdist_group("faults")  # in turn: they share a server, and their limits are in seconds

LORA: dict[str, Any] = dict(fine_tuning="LoRA", lora_rank=4, max_steps=6, **TP)
ALL: dict[str, Any] = dict(together=True, **LORA)


@pytest.fixture(scope="module")
def alone(server: RankServer) -> Reference:
    """Undisturbed, and its adapters written by rank 0: what all ranks write must be the same files."""
    return undisturbed(server, "adapters", **LORA)


# Rank 0 makes the folder, then the file with its header, and writes; rank 1 opens it and writes.
@pytest.mark.parametrize(
    ("rank", "call"), [(0, 9), *(pytest.param(1, call, marks=pytest.mark.full) for call in (1, 4))]
)
def test_a_rank_killed_within_the_write_of_an_adapter_leaves_the_checkpoint_before_whole(
    server: RankServer, alone: Reference, rank: int, call: int
) -> None:
    run, other = f"k5-adapter-{rank}-{call}", 1 - rank
    with fault("K5", "kill -9 of one rank of two that write an adapter into one file, and the run again") as row:
        ended = server.run(run, faults=[dict(rank=rank, step=4, at="file", do="kill", call=call)], **ALL)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert (ended.codes[rank], ended.codes[other]) == (-signal.SIGKILL, 1), ended.story()
        assert f"error: rank {rank} ended while checkpoint-4 was being saved" in ended.said(other)
        assert [p.name for p in CheckpointManager(server.folder / run).list()] == ["checkpoint-2"], ended.story()
        judge(row, alone, server.folder / run, [ended], finished=False)
        again = server.run(run, **ALL)
        judge(row, alone, server.folder / run, [ended, again], finished=True)
        assert not list((server.folder / run).glob(".tmp-*")), "swept"


def test_a_disk_that_is_full_for_one_rank_costs_that_save_of_an_adapter_alone(
    server: RankServer, alone: Reference
) -> None:
    with fault("D1", "disk full on rank 1 within its part of an adapter") as row:
        faults = [dict(rank=1, step=4, at="file", do="fail", code=errno.ENOSPC, call=4)]
        ended = server.run("d5-adapter", faults=faults, **ALL)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert "NOT SAVED: rank 1: checkpoint-4 was not written: No space left on device" in ended.said(0)
        assert ended.said(0).count("CHECKPOINT NOT SAVED") == 1, ended.story()
        judge(row, alone, server.folder / "d5-adapter", [ended], finished=True)
