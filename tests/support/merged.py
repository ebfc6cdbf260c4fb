"""Adapters folded into the weights of a model in memory, by the rules of an export: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from erniekit.lora.adapter import LowRank
from erniekit.lora.inject import lora_linears
from erniekit.lora.merge import WeightUpdate, merged_in_fp32
from erniekit.lora.projections import projections


def merged_tensor(weight: torch.Tensor, updates: Sequence[WeightUpdate]) -> torch.Tensor:
    return merged_in_fp32(weight, updates).to(weight.dtype)


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Merge a model's adapters in place and give it back its plain layers: the same outputs at the base's speed."""
    by_place = {p.place: p for p in projections(model)}
    for name, module in lora_linears(model):
        updates = []
        for pair in module.pairs().values():
            for expert, part, A, B, magnitude in pair.updates(*pair.sides, pair.magnitude):
                rows = by_place[name, part, expert]
                updates.append(WeightUpdate(rows.start, rows.stop, LowRank(A, B, pair.scale, magnitude)))
        module.base.weight.copy_(merged_tensor(module.base.weight, updates))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.base)
    return model
