"""A tower whose weights are whole on every tensor-parallel rank: its items are dealt out by cost, and each rank gets
the features of all. Called by tensor.py.

Which rank encodes which item follows from costs and counts alone, so there is no communication and no wait for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.kernels.autograd_function import Function
from erniekit.model_contract import Tower
from erniekit.parallel import comm


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which items each rank encodes: the most expensive first, each to the rank with the least so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = loads.index(min(loads))
        hands[rank].append(number)
        loads[rank] += costs[number]
    return [sorted(hand) for hand in hands]


class DealtInputs(nn.Module):
    """In the slot of models.layers.tower.LocalEncoder.

    sliced: a rank's gradients of the features are those of its own slice of the rows, to be summed; else each rank has
    all of them. Either way it passes on those of its own items: the tower's gradients are summed over the ranks.
    """

    def __init__(self, group: ProcessGroup, rank: int, sliced: bool) -> None:
        super().__init__()
        self.group, self.rank, self.sliced = group, rank, sliced

    def forward(self, tower: Tower, inputs: Any) -> torch.Tensor:
        device, counts = inputs.places.device, tower.counts(inputs)
        hands = deal(tower.costs(inputs), self.group.size())
        own = tower.encode_here(tower.select(inputs, hands[self.rank]))
        most = max(sum(counts[n] for n in hand) for hand in hands)
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        place_of = torch.empty(starts[-1], dtype=torch.int64)
        own_rows: list[int] = []
        for rank, hand in enumerate(hands):
            at = rank * most  # where each item's features are in what comes
            for n in hand:
                place_of[starts[n] : starts[n + 1]] = torch.arange(at, at + counts[n])
                at += counts[n]
                own_rows += range(starts[n], starts[n + 1]) if rank == self.rank else ()
        rows = torch.tensor(own_rows, dtype=torch.int64)
        result: torch.Tensor = _Join.apply(own, place_of.to(device), rows.to(device), most, self.group, self.sliced)
        return result


class _Join(Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        place_of: torch.Tensor,
        rows: torch.Tensor,
        most: int,
        group: ProcessGroup,
        summed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.group, ctx.summed = group, summed
        padded = F.pad(own, (0, 0, 0, most - own.shape[0])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        comm.all_gather(parts, padded, group)
        return torch.cat(parts).index_select(0, place_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        if ctx.summed:
            grad = grad.clone()
            comm.all_reduce(grad, ctx.group)
        return grad.index_select(0, rows), None, None, None, None, None
