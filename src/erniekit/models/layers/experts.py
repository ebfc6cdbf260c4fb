"""The routed experts' weights: all experts of a projection in one matrix, multiplied in one grouped product.

Held by models/layers/moe.py; LoRA wraps ExpertLinear as it wraps a linear. E experts, R rows sorted by expert.
"""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.grouped_gemm import grouped_linear, of_somebody
from erniekit.kernels.swiglu import swiglu


class ExpertLinear(nn.Module):
    """weight [E * out, in]: expert after expert, so that names, shards and files see plain rows.

    parts: (public name, rows) of one expert's rows, as in FusedLinear.
    """

    def __init__(self, experts: int, in_features: int, parts: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.experts, self.in_features, self.parts = experts, in_features, parts
        self.weight = nn.Parameter(torch.empty(experts * self.out_features, in_features))

    @property
    def out_features(self) -> int:
        """Of one expert."""
        return sum(rows for _, rows in self.parts)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_linear(rows, self.weight.view(self.experts, self.out_features, self.in_features), ends)


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(experts, hidden, (("gate_proj", width), ("up_proj", width)))
        self.down = ExpertLinear(experts, width, (("down_proj", hidden),))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor, spare: bool = False) -> torch.Tensor:
        """Rows sorted by expert, `ends` int32 [E]: one past each expert's last row. spare: some may be nobody's."""
        if not spare:
            return self.down(swiglu(self.gate_up(rows, ends)), ends)
        return of_somebody(self.down(swiglu(self.gate_up(of_somebody(rows, ends), ends)), ends), ends)
