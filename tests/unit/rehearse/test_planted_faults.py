"""Each fault is planted in one rank of a real step, or of a few lines that talk: a rehearsal names the rank, the call
and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erniekit.parallel import comm, gradients
from erniekit.parallel.layout import Layout
from support.tiny_step import faults, recorded, step, told

HERE = Path(__file__).name
PIPELINE, TENSOR = Layout(pp=2), Layout(tp=2)


def test_a_wrong_stage_shape_is_named_on_both_sides():
    text = told(recorded(2, lambda rank: step(PIPELINE, rank, length=24 if rank else 16)))
    assert "from rank 0 to rank 1 is not what is expected" in text
    assert "send float32 [1, 16, 32] to rank 1" in text
    assert "recv float32 [1, 24, 32] from rank 0" in text
    assert "parallel/pipeline.py" in text


def test_a_collective_that_one_rank_skips_is_named(monkeypatch):
    """The gradient norm's, on rank 1 alone."""
    real = comm.all_reduce

    def run(rank: int) -> None:
        def skipping(x: torch.Tensor, group: Any = None, op: str = "sum") -> None:
            if not (rank == 1 and x.dtype == torch.float64):
                real(x, group, op)

        monkeypatch.setattr(gradients.comm, "all_reduce", skipping)
        step(TENSOR, rank)

    (first, *_) = faults(recorded(2, run))
    assert first.ranks == (1,)
    assert any("all_reduce float64 [] (sum)" in line for line in first.lines)
    assert any("makes no further call" in line for line in first.lines)


def test_a_different_number_of_layers_is_named():
    traces = recorded(2, lambda rank: step(TENSOR, rank, layers=3 if rank else 4))
    text = told(traces)
    assert "rank 1 differs in call" in text
    assert "parallel/" in text


def test_a_different_number_of_micro_batches_is_named():
    text = told(recorded(2, lambda rank: step(PIPELINE, rank, micro_batches=3 if rank else 4)))
    assert "rank 1 never receives message" in text
    assert "deadlock" in text


def test_groups_used_in_another_order_by_one_rank_are_a_deadlock():
    def run(rank: int) -> None:
        first, second = comm.new_group([0, 1]), comm.new_group([0, 1])
        for group in (first, second) if rank == 0 else (second, first):
            comm.all_reduce(torch.zeros(3), group)

    (only,) = faults(recorded(2, run))
    assert only.ranks == (0, 1)
    assert "wait for each other in a circle" in only.what
    assert all(HERE in line for line in only.lines)


def test_groups_made_in_another_order_by_one_rank_are_found():
    def run(rank: int) -> None:
        wide = comm.new_group([0, 1]) if rank == 0 else None
        narrow = comm.new_group([0, 1])
        wide = wide if wide is not None else comm.new_group([0, 1])
        comm.all_reduce(torch.zeros(8), wide)
        comm.all_reduce(torch.zeros(2), narrow)

    text = told(recorded(2, run))
    assert "all_reduce float32 [8]" in text
    assert "all_reduce float32 [2]" in text


def test_two_ranks_that_both_send_first_are_a_deadlock():
    def run(rank: int) -> None:
        dist.send(torch.zeros(2), 1 - rank)
        dist.recv(torch.zeros(2), 1 - rank)

    (only,) = faults(recorded(2, run))
    assert "deadlock" in only.what
    assert "rank 0 waits for rank 1: send float32 [2] to rank 1" in only.lines[0]


def test_sends_that_are_not_waited_for_are_no_deadlock():
    def run(rank: int) -> None:
        work = comm.isend(torch.zeros(2), 1 - rank)
        dist.recv(torch.zeros(2), 1 - rank)
        work.wait()

    assert not faults(recorded(2, run))


def test_a_wrong_dtype_is_named():
    def run(rank: int) -> None:
        comm.all_reduce(torch.zeros(4, dtype=torch.bfloat16 if rank == 2 else torch.float32))

    (only,) = faults(recorded(4, run))
    assert only.ranks == (2,)
    assert any("rank 2: all_reduce bfloat16 [4]" in line and HERE in line for line in only.lines)


def test_another_reduction_on_one_rank_is_named():
    (only,) = faults(recorded(3, lambda rank: comm.all_reduce(torch.zeros(4), op="max" if rank == 1 else "sum")))
    assert only.ranks == (1,)


def test_a_message_to_the_wrong_rank_is_named():
    def run(rank: int) -> None:
        if rank == 0:
            dist.send(torch.zeros(2), 2)  # meant for rank 1
        elif rank == 1:
            dist.recv(torch.zeros(2), 0)

    text = told(recorded(3, run))
    assert "rank 2 never receives message 1 from rank 0 to rank 2" in text
    assert "rank 0 never sends message 1 from rank 0 to rank 1" in text


def test_a_receive_that_is_missing_is_named():
    def run(rank: int) -> None:
        works = [comm.isend(torch.zeros(k + 1), 1) for k in range(2)] if rank == 0 else []
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
        for work in works:
            work.wait()

    text = told(recorded(2, run))
    assert "rank 1 never receives message 2 from rank 0 to rank 1" in text
    assert "rank 0 waits for rank 1 (which has ended): send float32 [2]" in text


def test_a_barrier_more_on_one_rank_is_named():
    def run(rank: int) -> None:
        comm.all_reduce(torch.zeros(1))
        if rank == 3:
            dist.barrier()
        comm.all_reduce(torch.zeros(1))

    first, *_ = faults(recorded(4, run))
    assert first.ranks == (3,)
    assert any(line.startswith("rank 3: barrier") for line in first.lines)


def test_rows_for_which_there_is_no_room_are_named():
    def run(rank: int) -> None:
        sent = [3, 1] if rank == 0 else [1, 1]
        got = [3, 1] if rank == 0 else [2, 1]
        comm.all_to_all(torch.zeros(sum(got), 4), torch.zeros(sum(sent), 4), got, sent)

    (only,) = faults(recorded(2, run))
    assert "rank 0 sends 1 row to rank 1, which has room for 2" in only.what


def test_an_object_that_only_one_rank_gathers_is_named():
    def run(rank: int) -> None:
        if rank == 0:
            comm.gather_objects("x", dist.group.WORLD)
        comm.broadcast_object("x", 0, dist.group.WORLD)

    first, *_ = faults(recorded(2, run))
    assert any("all_gather_object" in line for line in first.lines)


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_alike_on_all_ranks_is_no_fault(count: int):
    def run(rank: int) -> None:
        for _ in range(count):
            comm.all_reduce(torch.zeros(4))
        comm.gather_objects(rank, dist.group.WORLD)

    assert not faults(recorded(3, run))
