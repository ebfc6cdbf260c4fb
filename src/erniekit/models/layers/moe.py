"""The mixture-of-experts block: route, send tokens to their experts, weigh the answers, add the shared experts.

Single device; parallel/ swaps `exchange`, losses/ puts `balance` in. B batch, L length, H hidden, T = B * L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.kernels import expert_mlp, lora_linear
from erniekit.kernels.experts_and_shared import experts_and_shared
from erniekit.kernels.moe_permute import by_expert
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.linear import is_watched
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.router import Router, Routing


class LocalExchange(nn.Module):
    """All experts are here."""

    def forward(self, x_TH: torch.Tensor, routing: Routing, experts: nn.Module, count: int) -> torch.Tensor:
        order = by_expert(routing.ids, count)
        return experts(x_TH, order.ends, routing.dropped, (order, routing.weights))


class NoBalance(nn.Module):
    """Where router losses would be attached to the block's output."""

    def forward(self, y_BLH: torch.Tensor, routing: Routing, router: Router, ctx: Any) -> torch.Tensor:
        return y_BLH


class MoE(nn.Module):
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

    def forward(self, x_BLH: torch.Tensor, ctx: Any) -> torch.Tensor:
        x_TH = x_BLH.flatten(0, 1)
        routing = self.router(x_TH)
        together = self._both_as_op(x_TH, routing)
        if together is None:
            y_TH, own = self.exchange(x_TH, routing, self.experts, self.router.experts), None
        else:
            held, *shared = together
            order = by_expert(routing.ids, self.router.experts)
            y_TH, own = experts_and_shared(expert_mlp.as_given(x_TH, order, routing.weights, *held), x_TH, *shared)
        y_BLH: torch.Tensor = self.balance(y_TH.view_as(x_BLH), routing, self.router, ctx)
        if self.shared is None:
            return y_BLH
        return y_BLH + (self.shared(x_BLH) if own is None else own.view_as(x_BLH))

    def _both_as_op(self, x_TH: torch.Tensor, routing: Routing) -> tuple[Any, ...] | None:
        """What both kinds of experts are given, where all are here and the shared ones, adapted, can run beside the
        others; None: one after the other."""
        if self.shared is None or routing.dropped or not isinstance(self.exchange, LocalExchange):
            return None
        linears: list[Any] = [self.shared.gate_up, self.shared.down]
        if any(is_watched(module) for module in (self.exchange, self.experts, self.shared, *linears)):
            return None
        adapted = [linear.as_op(x_TH) for linear in linears if hasattr(linear, "as_op")]
        if len(adapted) < 2 or not all(each is not None and _frozen(*each[:2]) for each in adapted):
            return None
        held = self.experts.as_op(x_TH)
        return None if held is None else (held, *(lora_linear.as_given(each[0], each[2]) for each in adapted))


def _frozen(weight: Any, bias: torch.Tensor | None) -> bool:
    return bias is None and not getattr(weight, "requires_grad", False)
