"""The mixture-of-experts block: route, dispatch tokens to their experts, combine the outputs, add the shared experts.

Single device; parallel/ swaps `exchange`, losses/ puts `balance` in. B batch, L length, H hidden, T = B * L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from erniekit.kernels.moe_permute import by_expert
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.router import Router, Routing


class LocalExchange(nn.Module):
    """All experts are here."""

    def forward(self, x_TH: torch.Tensor, routing: Routing, experts: nn.Module, count: int) -> torch.Tensor:
        y_TH: torch.Tensor = experts(x_TH, by_expert(routing.ids, count), routing.weights, routing.own)
        return y_TH


class NoBalance(nn.Module):
    """Where router losses would be attached to the block's output."""

    def forward(self, y_BLH: torch.Tensor, routing: Routing, router: Router, ctx: Any) -> torch.Tensor:
        return y_BLH


class MoE(nn.Module):
    """An ExpertBlock of model_contract.py, and its own ExpertBank."""

    correction: nn.Module | None = None  # one router: its bias is its own
    piece = (0, 1)  # of a row: whole or not, its tokens take the same way

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.layer = layer
        self.router = Router(config)
        self.experts = Experts(moe.experts, config.hidden_size, moe.width)
        self.shared = MLP(config.hidden_size, moe.shared_width, config.mlp_bias) if moe.shared_width else None
        self.exchange: nn.Module = LocalExchange()
        self.balance: nn.Module = NoBalance()

    def banks(self) -> Iterator[Any]:
        """Every router with its experts: here the one there is."""
        yield self

    def forward(self, x_BLH: torch.Tensor, ctx: Any) -> torch.Tensor:
        x_TH = x_BLH.flatten(0, 1)
        routing = self.router(x_TH)
        y_TH = self.exchange(x_TH, routing, self.experts, self.router.experts)
        y_BLH: torch.Tensor = self.balance(y_TH.view_as(x_BLH), routing, self.router, ctx)
        return y_BLH if self.shared is None else y_BLH + self.shared(x_BLH)


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import ExpertBank, ExpertBlock

    def _block(layer: MoE) -> ExpertBlock:
        return layer

    def _bank(layer: MoE) -> ExpertBank:
        return layer
