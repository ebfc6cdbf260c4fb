"""A residual and what a block adds to it, summed and normalised in one sweep. Called by serve/engines, where a step is
so short that its launches count. rms_norm.py is the definition of the norm. T tokens, H hidden."""

from __future__ import annotations

import torch

from erniekit.kernels.available import runs_triton
from erniekit.kernels.rms_norm import rms_norm


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, added [T, H] -> (x + added, its norm times weight), both in x's dtype; added None: x as it is."""
    if runs_triton(x):
        from erniekit.kernels.triton import add_norm as kernels

        return kernels.add_norm(x, added, weight, eps)
    return reference(x, added, weight, eps)


def reference(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if added is None else x + added
    return x, rms_norm(x, weight, eps)
