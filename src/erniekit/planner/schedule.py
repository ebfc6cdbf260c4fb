"""A pipeline's actions in order, as torch's schedules run them, and a replay of them against the clock. No torch.

Read by memory (how many micro-batches are under way) and timing (how long ranks wait for each other).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

REPLAYED = 3  # micro-batches for each rank, after which a pipeline runs evenly


class Action(NamedTuple):
    kind: str  # F | B
    stage: int
    micro_batch: int


@cache
def actions(ranks: int, stages_each: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """What a rank does in a step. One stage each: 1F1B, or all forward first where there are fewer micro-batches than
    ranks; several: interleaved. Stage s belongs to rank s % ranks."""
    if stages_each > 1:
        return _interleaved(ranks, stages_each, micro_batches, rank)
    warm = warm_up(ranks, stages_each, micro_batches, rank)
    out = [Action("F", rank, m) for m in range(warm)]
    for m in range(micro_batches):
        out.append(Action("B", rank, m))
        if warm + m < micro_batches:
            out.append(Action("F", rank, warm + m))
    return tuple(out)


def _interleaved(ranks: int, stages_each: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    rounds = max(1, micro_batches // ranks)
    each = micro_batches // rounds  # micro-batches that a stage takes before the next stage of the rank does
    total = stages_each * micro_batches
    warm = warm_up(ranks, stages_each, micro_batches, rank)

    def forward(k: int) -> Action:
        local = k // each % stages_each
        return Action("F", local * ranks + rank, k // (each * stages_each) * each + k % each)

    def backward(k: int) -> Action:
        local = stages_each - 1 - k // each % stages_each
        return Action("B", local * ranks + rank, k // (each * stages_each) * each + k % each)

    out = [forward(k) for k in range(warm)]
    for k in range(total):
        out.append(backward(k))
        if warm + k < total:
            out.append(forward(warm + k))
    return tuple(out)


def warm_up(ranks: int, stages_each: int, micro_batches: int, rank: int) -> int:
    """Forward actions before the first backward. No more are ever under way: from there on they take turns."""
    if stages_each == 1:
        return micro_batches if micro_batches < ranks else min(micro_batches, ranks - rank)
    each = micro_batches // max(1, micro_batches // ranks)
    return min(stages_each * micro_batches, (stages_each - 1) * each + 2 * (ranks - 1 - rank) + 1)


def most_in_flight(ranks: int, stages_each: int, micro_batches: int, rank: int) -> float:
    """Micro-batches whose activations a rank holds at once, in all its stages together: two halves are one."""
    return warm_up(ranks, stages_each, micro_batches, rank) / stages_each


def step_seconds(
    ranks: int,
    stages_each: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float | Sequence[float] = 0.0,
) -> float:
    """As `replay`; of many micro-batches a part is replayed, as further ones are as long as the slowest rank's."""
    some = min(micro_batches, REPLAYED * ranks)
    slowest = max(sum(forward[s] + backward[s] for s in range(r, len(forward), ranks)) for r in range(ranks))
    return replay(ranks, stages_each, some, forward, backward, send) + (micro_batches - some) * slowest


def replay(
    ranks: int,
    stages_each: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float | Sequence[float] = 0.0,
) -> float:
    """Seconds until the last rank is done. forward, backward: of each stage; send: of hidden states from stage s to the
    next. Raises ValueError where ranks wait for each other for ever."""
    count = ranks * stages_each
    sends = [send] * count if isinstance(send, int | float) else list(send)
    lists = [actions(ranks, stages_each, micro_batches, rank) for rank in range(ranks)]
    done: dict[Action, float] = {}
    at, clock = [0] * ranks, [0.0] * ranks
    left = sum(map(len, lists))
    while left:
        moved = False
        for rank, todo in enumerate(lists):
            while at[rank] < len(todo):
                action = todo[at[rank]]
                ready = _ready(action, done, count, sends)
                if ready is None:
                    break
                seconds = forward[action.stage] if action.kind == "F" else backward[action.stage]
                clock[rank] = max(clock[rank], ready) + seconds
                done[action] = clock[rank]
                at[rank] += 1
                left -= 1
                moved = True
        if not moved:
            stuck = [f"rank {r} at {lists[r][at[r]]}" for r in range(ranks) if at[r] < len(lists[r])]
            raise ValueError(f"the schedule stops: {'; '.join(stuck)}")
    return max(clock)


def _ready(action: Action, done: dict[Action, float], count: int, sends: Sequence[float]) -> float | None:
    """When what an action waits for has arrived; None: not yet."""
    kind, stage, m = action
    if kind == "F":
        if stage == 0:
            return 0.0
        before = done.get(Action("F", stage - 1, m))
        return None if before is None else before + sends[stage - 1]
    if stage == count - 1:
        return done.get(Action("F", stage, m))
    after = done.get(Action("B", stage + 1, m))
    return None if after is None else after + sends[stage]
