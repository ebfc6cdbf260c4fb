"""The routed experts' weights: all experts of a projection in one matrix, multiplied in one grouped product.

Held by models/layers/moe.py; LoRA wraps ExpertLinear as it wraps a linear. E experts, R rows sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.kernels.expert_mlp import Update, expert_mlp, fits
from erniekit.kernels.grouped_gemm import grouped_linear, of_somebody
from erniekit.kernels.moe_permute import Order, combine, gather
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

    def matrices(self) -> torch.Tensor:
        """[E, out, in]. LoRA's may be in fp8: an Fp8Weight."""
        return self.weight.view(self.experts, self.out_features, self.in_features)

    def updates(self) -> dict[str, Update]:
        """Of parts, by name: LoRA has some."""
        return {}

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_linear(rows, self.matrices(), ends)


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(experts, hidden, (("gate_proj", width), ("up_proj", width)))
        self.down = ExpertLinear(experts, width, (("down_proj", hidden),))

    def forward(
        self,
        rows: torch.Tensor,
        ends: torch.Tensor,
        spare: bool = False,
        choices: tuple[Order, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Rows sorted by expert, `ends` int32 [E]: one past each expert's last row. spare: some may be nobody's.

        choices: the rows are tokens yet, each to go to its experts in this order; answered is the sum of what those
        say, weighed [T, K].
        """
        return self._of_rows(rows, ends, spare) if choices is None else self._of_tokens(rows, *choices, spare)

    def _of_rows(self, rows: torch.Tensor, ends: torch.Tensor, spare: bool) -> torch.Tensor:
        if not spare:
            return self.down(swiglu(self.gate_up(rows, ends)), ends)
        return of_somebody(self.down(swiglu(self.gate_up(of_somebody(rows, ends), ends)), ends), ends)

    def as_op(self, x_TH: torch.Tensor) -> tuple[Any, ...] | None:
        """Weights and updates as kernels/expert_mlp.py takes them; None: it does not take these."""
        gate_up, down = self.gate_up.matrices(), self.down.matrices()
        updates = {**self.gate_up.updates(), **self.down.updates()}
        three = [updates.get(part) for part, _ in (*self.gate_up.parts, *self.down.parts)]
        return (gate_up, down, *three) if fits(x_TH, gate_up, down, *three) else None

    def _of_tokens(self, x_TH: torch.Tensor, order: Order, weights: torch.Tensor, spare: bool) -> torch.Tensor:
        held = None if spare else self.as_op(x_TH)
        if held is not None:
            return expert_mlp(x_TH, order, weights, *held)
        rows = gather(x_TH, order, weights.shape[1])
        return combine(self._of_rows(rows, order.ends, spare), weights, order)
