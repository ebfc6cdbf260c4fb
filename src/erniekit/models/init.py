"""Random weights for a model that starts from nothing: the same values whatever the layout or order of building.

Called by recipes/build.py and the demo.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, std: float) -> None:
    """Matrices normal(0, std), norms one, biases zero; each tensor from its own generator, seeded by its name."""
    for name, param in model.named_parameters():
        if param.ndim >= 2:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            values = torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            param.copy_(values)
        elif name.endswith("bias"):
            param.zero_()
        else:
            param.fill_(1.0)
