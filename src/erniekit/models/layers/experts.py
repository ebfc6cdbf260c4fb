"""The routed experts' weights, all experts of a projection in one, and the op that multiplies by them.

Held by models/layers/moe.py; LoRA wraps ExpertLinear as it wraps a linear. E experts, T tokens, K choices.
"""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.expert_mlp import Update, expert_mlp
from erniekit.kernels.moe_permute import Order
from erniekit.kernels.stored import Stored
from erniekit.models.layers.linear import HoldsWeight


class ExpertLinear(HoldsWeight):
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

    def matrices(self) -> Stored:
        """[E, out, in]."""
        return self.stored().of_experts(self.experts)

    def updates(self) -> dict[str, Update]:
        """Of parts, by name: LoRA has some."""
        return {}


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(experts, hidden, (("gate_proj", width), ("up_proj", width)))
        self.down = ExpertLinear(experts, width, (("down_proj", hidden),))

    def forward(self, x_TH: torch.Tensor, order: Order, weights: torch.Tensor | None) -> torch.Tensor:
        """Each token to its experts in this order; the sum of their answers, weighted by weights [T, K]. None: one
        choice a token, whole."""
        updates = {**self.gate_up.updates(), **self.down.updates()}
        three = [updates.get(part) for part, _ in (*self.gate_up.parts, *self.down.parts)]
        return expert_mlp(x_TH, order, weights, self.gate_up.matrices(), self.down.matrices(), *three)
