"""The frozen side of LoRA in another stored kind than plain: `frozen_base`. Called by recipes/build.py.

The plain weights are never whole in the device's memory: each is packed as it is filled. Whatever needs them (merging,
exporting, resuming) reads them from their folder. Embeddings, head, norms, routers and layers without adapters stay
plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from erniekit.errors import ConfigError
from erniekit.kernels.stored import kind_named
from erniekit.lora.layers import LoRAExperts, LoRALinear


def check(kind: str, device: torch.device, experts: bool, where: str) -> None:
    """Before anything is loaded: whether this run's device can multiply by such a base."""
    if (reason := kind_named(kind).why_not(device, experts)) is not None:
        raise ConfigError(f"frozen_base: {kind} does not run here: {reason}", where=where, fix="frozen_base: bf16")


def store_frozen(model: nn.Module, kind: str, shapes: Callable[[str], Iterable[tuple[int, int]]]) -> list[str]:
    """Every adapted linear's and expert's frozen weight becomes of this kind; the model has no memory yet. Answers the
    layers that stay plain: the kind does not take their widths.

    shapes(weight's name): of its matrix on every rank, so that all ranks decide alike."""
    left = []
    for name, layer in model.named_modules():
        if not isinstance(layer, (LoRALinear, LoRAExperts)) or layer.base.weight is None:
            continue
        if all(kind_named(kind).fits(*shape) for shape in shapes(f"{name}.weight")):
            layer.base.store_as(kind)
        else:
            left.append(name)
    return left
