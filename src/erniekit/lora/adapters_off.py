"""The model without its adapters, for a while: DPO's reference. Called by recipes/reference.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from erniekit.lora.layers import LoRALayer


@contextmanager
def adapters_off(parts: Iterable[nn.Module]) -> Iterator[None]:
    layers = [module for part in parts for module in part.modules() if isinstance(module, LoRALayer)]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True
