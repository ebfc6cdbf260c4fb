"""Whole matrices from the pieces that ranks hold, for updates that look at a matrix as one (optim/muon.py).

Made by recipes/optimiser.py. Every rank of the group gets the whole tensor, one at a time, and works on it alike: one
exchange instead of two, and the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from erniekit.parallel.mesh import World
from erniekit.parallel.reduce import all_reduce
from erniekit.parallel.sharding import Box, Sharding


class WholeTensors:
    def __init__(self, names: Iterable[str], sharding: Sharding, world: World) -> None:
        """names: of tensors this rank holds pieces of. All ranks must make one together: it opens a group."""
        self.sharding, self.rank = sharding, world.rank
        layout = world.layout
        spread = ("fsdp", "cp") if layout.fsdp > 1 else ()
        self.group = world.joined("tp", *spread)
        names = list(names) if self.group is not None else []
        # Experts that are dealt out to data ranks are whole where they are: holds_whole_experts.
        here = [n for n in names if not (layout.experts_over_data and sharding.is_expert(n))]
        self.boxes: dict[str, tuple[Box, ...]] = {n: sharding.boxes(n, self.rank) for n in here}
        self.owned: dict[str, tuple[Box, ...]] = {
            n: dict(sharding.holders(n)).get(sharding.twin(n, self.rank), ()) for n in here
        }

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """All ranks' pieces in their places; all ranks of the group call it for the same tensors in one order."""
        if name not in self.boxes:
            return piece
        out = piece.new_zeros(self.sharding.shape(name))
        for box in self.owned[name]:
            out[box.global_slices] = piece[box.local_slices]
        all_reduce(out, self.group)  # each element is one rank's, and zero elsewhere
        return out

    def piece(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's piece, of `like`'s shape."""
        if name not in self.boxes:
            return whole
        out = whole.new_zeros(like.shape)
        for box in self.boxes[name]:
            out[box.local_slices] = whole[box.global_slices]
        return out


def holds_whole_experts(sharding: Sharding) -> bool:
    """Whether experts that are dealt out to data ranks are not cut any further, by rows or inside."""
    layout = sharding.layout
    if not layout.experts_over_data:
        return True
    return not sharding.cuts_inside_experts and (layout.fsdp == 1 or layout.expert_copies == 1)
