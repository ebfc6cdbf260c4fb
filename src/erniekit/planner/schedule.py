"""Seconds of a step's pipeline: the action lists that the trainer runs, replayed against the clock. No torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from erniekit.parallel.pipeline_actions import BACKWARD, FORWARD, Action
from erniekit.parallel.pipeline_schedule import computations
from erniekit.parallel.pipeline_simulator import Timeline, simulate

REPLAYED = 3  # micro-batches for each rank, after which a pipeline runs evenly


class StageTimes(NamedTuple):
    """Seconds of one micro-batch in every stage, in order."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: float | tuple[float, ...] = 0.0  # of hidden states from stage s to the next

    def of(self, action: Action) -> float:
        if action.kind == FORWARD:
            return self.forward[action.stage]
        # In two parts, a backward pass is the gradient of the input and that of the weights: about half each.
        return self.backward[action.stage] * (1.0 if action.kind == BACKWARD else 0.5)


def replay(name: str, ranks: int, stages_each: int, micro_batches: int, times: StageTimes) -> Timeline:
    """Without the transfers of the lists: none of them blocks, and the order of the computations is the same."""
    return simulate(computations(name, ranks, stages_each, micro_batches), times.of, times.send)


@lru_cache(maxsize=256)  # layouts that share out weights differently may compute alike
def step_seconds(name: str, ranks: int, stages_each: int, micro_batches: int, times: StageTimes) -> float:
    """Of many micro-batches a part is replayed, as further ones are as long as the slowest rank's."""
    some = min(micro_batches, REPLAYED * ranks)
    each = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    slowest = max(sum(each[rank::ranks]) for rank in range(ranks))
    return replay(name, ranks, stages_each, some, times).seconds + (micro_batches - some) * slowest
