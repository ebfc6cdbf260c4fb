"""A vision tower whose weights are whole on every tensor-parallel rank: pictures are dealt out by cost, and each rank
gets the features of all. Called by tensor.py. V vision tokens, H hidden.

Which rank computes which picture follows from the grids only, so there is no communication and no wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.kernels.autograd_function import Function
from erniekit.parallel import comm


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which pictures each rank computes: the most expensive first, each to the rank with the least so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = loads.index(min(loads))
        hands[rank].append(number)
        loads[rank] += costs[number]
    return [sorted(hand) for hand in hands]


class DealtPictures(nn.Module):
    """In the slot of models.layers.vision_language.LocalEncoder.

    sliced: a rank's gradients of the features are those of its own slice of the rows, to be summed; else each rank has
    all of them. Either way it passes on those of its own pictures: the tower's gradients are summed over the ranks.
    """

    def __init__(self, group: ProcessGroup, rank: int, sliced: bool) -> None:
        super().__init__()
        self.group, self.rank, self.sliced = group, rank, sliced

    def forward(self, model: Any, vision: Any) -> torch.Tensor:
        grids, device = vision.grids, vision.patches.device
        hands = deal(model.picture_costs(grids), self.group.size())
        tokens = model.picture_tokens(grids)
        mine = hands[self.rank]
        patches = [part for n, part in enumerate(vision.patches.split(grids.prod(1).tolist())) if n in mine]
        chosen = torch.cat(patches) if patches else vision.patches[:0]
        own = model.encode_here(chosen, grids[torch.tensor(mine, dtype=torch.int64)])
        most = max(sum(tokens[n] for n in hand) for hand in hands)
        starts = torch.tensor([0, *tokens]).cumsum(0).tolist()
        place_of = torch.empty(starts[-1], dtype=torch.int64)
        own_rows: list[int] = []
        for rank, hand in enumerate(hands):
            at = rank * most  # where each picture's features are in what comes
            for n in hand:
                place_of[starts[n] : starts[n + 1]] = torch.arange(at, at + tokens[n])
                at += tokens[n]
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
