"""The SwiGLU feed-forward block, single device. Used by models/layers/decoder.py."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.swiglu import swiglu
from erniekit.models.layers.linear import FusedLinear


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden, (("gate_proj", width), ("up_proj", width)), bias)
        self.down = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(self.gate_up(x)))
