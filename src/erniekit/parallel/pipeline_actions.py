"""What a pipeline rank computes in a step, in order, as plain data. No torch: trainer, planner and rehearsal read it.

Stage s belongs to rank s % ranks. pipeline_schedule.py puts the transfers between these computations.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHT = "input", "weight"  # a backward pass in two: the gradient of the stage's input, those of its weights
SEND_ACTIVATION, RECEIVE_ACTIVATION = "send activation", "receive activation"
SEND_GRADIENT, RECEIVE_GRADIENT = "send gradient", "receive gradient"
COMPUTED = (FORWARD, BACKWARD, INPUT, WEIGHT)
SENDS = {SEND_ACTIVATION: (RECEIVE_ACTIVATION, 1), SEND_GRADIENT: (RECEIVE_GRADIENT, -1)}  # kind there, stages on
RECEIVES = {RECEIVE_ACTIVATION: (SEND_ACTIVATION, -1), RECEIVE_GRADIENT: (SEND_GRADIENT, 1)}
TRANSFERS = SENDS | RECEIVES


class Action(NamedTuple):
    kind: str
    stage: int  # of a transfer: the stage at this end
    micro_batch: int

    @property
    def peer(self) -> Action:
        """A transfer as the other end has it."""
        kind, on = TRANSFERS[self.kind]
        return Action(kind, self.stage + on, self.micro_batch)


Order = tuple[Action, ...]


@cache
def gpipe(ranks: int, micro_batches: int, rank: int) -> Order:
    """All forward, then all backward: as many micro-batches are held as a step has."""
    kinds = (FORWARD, BACKWARD)
    return tuple(Action(kind, rank, m) for kind in kinds for m in range(micro_batches))


@cache
def one_forward_one_backward(ranks: int, stages_each: int, micro_batches: int, rank: int) -> Order:
    """1F1B; with several stages a rank, interleaved: each takes a group of micro-batches before the next stage does."""
    rounds = max(1, micro_batches // ranks) if stages_each > 1 else 1
    each = micro_batches // rounds  # micro-batches of a group
    total, warm = stages_each * micro_batches, warm_up(ranks, stages_each, micro_batches, rank)

    def at(kind: str, k: int) -> Action:
        turn = k // each % stages_each
        local = turn if kind == FORWARD else stages_each - 1 - turn
        return Action(kind, local * ranks + rank, k // (each * stages_each) * each + k % each)

    out = [at(FORWARD, k) for k in range(warm)]
    for k in range(total):
        out.append(at(BACKWARD, k))
        if warm + k < total:
            out.append(at(FORWARD, warm + k))
    return tuple(out)


def warm_up(ranks: int, stages_each: int, micro_batches: int, rank: int) -> int:
    """Forward actions before the first backward. No more are ever under way: from there on they take turns."""
    if stages_each == 1:
        return min(micro_batches, ranks - rank)
    each = micro_batches // max(1, micro_batches // ranks)
    return min(stages_each * micro_batches, (stages_each - 1) * each + 2 * (ranks - 1 - rank) + 1)


def most_in_flight(ranks: int, stages_each: int, micro_batches: int, rank: int) -> float:
    """Micro-batches whose activations a rank holds at once, in all its stages together: two halves are one."""
    return warm_up(ranks, stages_each, micro_batches, rank) / stages_each
