"""The model cut in the stages of a pipeline. Called by apply.py; apart from pipeline.py, whose imports take seconds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from erniekit.model_contract import spread
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding import Sharding


class Skip(nn.Module):
    """Where a layer of another stage would be: names and numbers of the others stay as they are."""

    here = sparse = False

    def forward(self, x: torch.Tensor, ctx: Any) -> torch.Tensor:
        return x


def cut(model: nn.Module, sharding: Sharding, world: World) -> list[tuple[int, nn.Module]]:
    """(stage number, that part of the model) for each stage this rank holds."""
    stages = sharding.stages()
    if len(stages) == 1:
        return [(0, model)]
    out = []
    for number in range(world.at["pp"], len(stages), world.layout.pp):
        part = copy.copy(model)  # modules are shared, the table of them is not
        part._modules = dict(model._modules)
        held = stages[number]
        part.layers = nn.ModuleList(layer if i in held else Skip() for i, layer in enumerate(spread(model).layers))
        first, last = number == 0, number == len(stages) - 1
        spread(part).first, spread(part).last = first, last
        if not first and not (last and sharding.embeds_last):
            part._modules.pop("embed")
        for name in sharding.front if not first else ():
            part._modules.pop(name.removesuffix("."), None)
        if not last:
            for name in ("norm", "head"):
                part._modules.pop(name, None)
            part.mtp = nn.ModuleList()
        out.append((number, part))
    return out
