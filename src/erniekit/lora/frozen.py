"""The frozen side of LoRA in fp8: what `frozen_base: fp8` makes of adapted layers. Called by recipes/build.py.

The weights themselves are gone afterwards; whoever wants them (merging, exporting, resuming) reads them from their
folder, as ever. Embeddings, head, norms, routers and layers without adapters stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from erniekit.errors import ConfigError
from erniekit.kernels.fp8_product import fits, fp8_weight, why_not
from erniekit.lora.fp8_base import Fp8Base
from erniekit.lora.layers import LoRAExperts, LoRALayer, LoRALinear


def check(device: torch.device, ranks: int, experts: bool, where: str) -> None:
    """Before anything is loaded: whether this run's devices can have it."""
    reason = f"the run has {ranks} ranks; an fp8 base is for one" if ranks > 1 else why_not(device, experts)
    if reason is not None:
        raise ConfigError(f"frozen_base: fp8 does not run here: {reason}", where=where, fix="frozen_base: bf16")


def to_fp8(parts: Iterable[nn.Module]) -> list[str]:
    """Every adapted linear's and expert's frozen weight, one after the other, so that memory never holds more than one
    of them both ways. Answers the layers left as they were: widths that fp8 products do not take."""
    left = []
    for part in parts:
        for name, layer in part.named_modules():
            if not isinstance(layer, (LoRALinear, LoRAExperts)) or isinstance(layer.base, Fp8Base):
                continue
            matrix = _matrix(layer)
            if fits(matrix):
                layer.base = Fp8Base(fp8_weight(matrix), getattr(layer.base, "bias", None))
            else:
                left.append(name)
    return left


def _matrix(layer: LoRALayer) -> torch.Tensor:
    weight = layer.matrices() if isinstance(layer, LoRAExperts) else layer.weight
    return cast("torch.Tensor", weight).detach()
