"""Random weights for a model that starts from nothing: the same values whatever the layout or order of building.

Called by recipes/weights.py and the demo.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def initial_value(
    name: str, shape: tuple[int, ...], seed: int, std: float, device: torch.device | None = None
) -> torch.Tensor:
    """Matrices normal(0, std), norms one, biases zero; fp32, from a generator seeded by the tensor's name.

    Drawn on `device`, the CPU when not given: each kind of device has values of its own, and billions of them would
    keep a CPU busy for minutes.
    """
    device = device or torch.device("cpu")
    if len(shape) >= 2 and not name.endswith("bias"):
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        return drawn.normal_(0.0, std, generator=generator_of(name, seed, device))
    make = torch.zeros if name.endswith("bias") else torch.ones
    return make(shape, device=device)


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, std: float) -> None:
    for name, param in model.named_parameters():
        param.copy_(initial_value(name, tuple(param.shape), seed, std))
