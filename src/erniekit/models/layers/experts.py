"""The routed experts' weights, all experts of a projection in one, and the op that multiplies by them.

Held by models/layers/moe.py; LoRA wraps ExpertLinear as it wraps a linear. E experts, T tokens, K choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.kernels.expert_mlp import Update, expert_mlp, expert_mlp_and_seen
from erniekit.kernels.moe_permute import Order, combine, gather, weights_of_rows
from erniekit.kernels.stored import Stored
from erniekit.model_contract import bare
from erniekit.models.layers.linear import HoldsWeight


class ExpertLinear(HoldsWeight):
    """weight [E * out, in]: expert after expert, so that names, shards and files see plain rows.

    parts: (public name, rows) of one expert's rows, as in FusedLinear.
    """

    def __init__(self, experts: int, in_features: int, parts: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.rounding = None
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

    def forward(
        self, x_TH: torch.Tensor, order: Order, weights: torch.Tensor | None, own: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each token to its experts in this order; the sum of their outputs, weighted by weights [T, K]. None: one
        choice a token, whole. own: of Routing. Rows are cut here, where they are taken: what is compiled around this
        module may end at it, and a length that differs must not pass from one program to the next."""
        if own is not None and weights is not None:  # choices of no expert come last
            order = order._replace(row_of=order.row_of[: own.shape[0] * weights.shape[1]])
        updates = {**self.gate_up.updates(), **self.down.updates()}
        three = [updates.get(part) for part, _ in (*self.gate_up.parts, *self.down.parts)]
        given: tuple[Any, ...] = (self.gate_up.matrices(), self.down.matrices(), *three)
        if bare(self.gate_up).rounding is None:
            return expert_mlp(x_TH, order, weights, *given)
        return self._rounded(x_TH, order, weights, given)

    def _rounded(
        self, x_TH: torch.Tensor, order: Order, weights: torch.Tensor | None, given: tuple[Any, ...]
    ) -> torch.Tensor:
        """The outputs are weighted, not what goes into the second product: that is rounded as servers round it, and
        alike wherever the experts are."""
        rows, own = x_TH, order
        if weights is not None:
            rows = gather(x_TH, order, weights.shape[1])
            each = torch.arange(rows.shape[0], device=rows.device)
            own = order._replace(row_of=each, place_of=each)
        y, observed = expert_mlp_and_seen(rows, own, None, *given)
        for layer, of_rows in zip((self.gate_up, self.down), observed.split(1)):
            bare(layer).rounding.keep(of_rows)
        if weights is None:
            return y
        weighed = y.float() * weights_of_rows(weights, order).float()
        return combine(weighed, order, weights.shape[1]).to(y.dtype)
