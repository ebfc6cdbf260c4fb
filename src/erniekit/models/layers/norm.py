"""RMSNorm as a module. Used by models/layers/decoder.py."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.add_norm import add_norm, in_16_bits, reference
from erniekit.models.layers.linear import is_watched


class RMSNorm(nn.Module):
    keeps_kernel = False  # in compiled layers, too

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_sum(x)[1]

    def of_sum(self, x: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + added, and its norm; added None: of x. In wider formats as defined, so that training and evaluation have
        the same bits there too."""
        alike = in_16_bits(x, self.weight) and (added is None or added.dtype == x.dtype)
        if not alike:
            return reference(x, added, self.weight, self.eps)
        return add_norm(x, added, self.weight, self.eps, self.keeps_kernel)


def norm_of_sum(
    norm: nn.Module, x: torch.Tensor, added: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with any norm: one of another class, or that is watched, is called."""
    if type(norm) is RMSNorm and not is_watched(norm):
        return norm.of_sum(x, added)
    x = x if added is None else x + added
    return x, norm(x)
