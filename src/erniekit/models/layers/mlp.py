"""The SwiGLU feed-forward block, single device. Used by models/layers/decoder.py."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.gate_up import gate_up_swiglu
from erniekit.kernels.selection import GateUpFacts, chosen
from erniekit.kernels.swiglu import swiglu
from erniekit.models.layers.linear import FusedLinear, Linear, is_watched


class MLP(nn.Module):
    in_one_op = False  # gate, up and SwiGLU, where the card at hand does that

    def __init__(self, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden, (("gate_proj", width), ("up_proj", width)), bias)
        self.down = Linear(width, hidden, bias=bias)

    def choose_kernels(self, device: torch.device) -> None:
        """Called once adapters are in and weights are cut into shards."""
        self.in_one_op = chosen("feed-forward", self.kernel_facts(device)) == "quack"

    def kernel_facts(self, device: torch.device) -> GateUpFacts:
        plain = type(self.gate_up) is FusedLinear and self.gate_up.rounding is None
        weight = self.gate_up.weight if plain else None
        whole = weight is not None and self.gate_up.bias is None and not is_watched(self.gate_up)
        rows, hidden = (0, 0) if weight is None else weight.shape
        return GateUpFacts(device, hidden, rows, whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if self.in_one_op and not is_watched(self.gate_up):
            weight = self.gate_up.weight
            if weight is not None and x.dtype == weight.dtype == torch.bfloat16:
                result = self.down(gate_up_swiglu(x, weight))
                return result
        result = self.down(swiglu(self.gate_up(x)))
        return result
