"""Which parameters share a weight decay and a learning-rate factor. Called by recipes/optimiser.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Group:
    lr_scale: float
    weight_decay: float
    names: list[str] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)


def make_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    num_layers: int,
    weight_decay: float,
    layerwise_bound: float = 1.0,
    lr_scale_of: Callable[[str], float] = lambda name: 1.0,
    front: tuple[str, ...] = (),
) -> list[Group]:
    """Trainable parameters only. `lr_scale_of` is for LoRA+; decay skips names with `bias` or `norm`, as ERNIEKit's.
    front: how names of towers' weights begin."""
    groups: dict[tuple[float, float], Group] = {}
    for name, param in parameters:
        if not param.requires_grad:
            continue
        decay = 0.0 if "bias" in name or "norm" in name else weight_decay
        scale = layer_factor(name, num_layers, layerwise_bound, front) * lr_scale_of(name)
        group = groups.setdefault((scale, decay), Group(scale, decay))
        group.names.append(name)
        group.params.append(param)
    return list(groups.values())


def layer_factor(name: str, layers: int, bound: float, front: tuple[str, ...] = ()) -> float:
    """bound + depth / (layers + 2) * (1 - bound): embedding and towers are depth 0, head and final norm the deepest."""
    found = re.match(r"layers\.(\d+)\.", name)
    if found:
        depth = int(found[1]) + 1
    else:
        depth = 0 if name.startswith(("embed", *front)) else layers + 2
    return bound + depth / (layers + 2) * (1.0 - bound)
