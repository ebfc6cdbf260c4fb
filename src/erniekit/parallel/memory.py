"""Memory for modules that were built on the meta device. Called by apply.py and recipes/."""

from __future__ import annotations

import torch
from torch import nn


def give_memory(module: nn.Module, device: torch.device) -> None:
    """As `to_empty`, which imports sympy for its first tensor: seconds of every start."""
    module._apply(lambda tensor: _empty(tensor, device))


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if type(like) not in (torch.Tensor, nn.Parameter):  # spread by fsdp
        return torch.empty_like(like, device=device)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
