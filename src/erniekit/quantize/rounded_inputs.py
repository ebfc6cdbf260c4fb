"""A layer as an engine that quantises activations computes it: inputs of its linears and experts rounded first.

Used by streams.py, so that the numbers of a report are those of the served model. E experts, T tokens, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from erniekit.kernels.compressed import rounded_inputs
from erniekit.kernels.swiglu import swiglu
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.router import Routing
from erniekit.quant_schemes import QuantRecipe

Round = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def rounding(layer: nn.Module, recipe: QuantRecipe, scales: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """scales: of stored input scales, by the name of the weight inside the layer."""

    def of(name: str, scheme_of_experts: bool = False) -> Round:
        scheme = recipe.experts if scheme_of_experts else recipe.rest
        scale = scales.get(f"{name}.weight")
        return lambda x: rounded_inputs(x, scheme, None if scale is None else scale.to(x.device))

    undo: list[Callable[[], object]] = []
    for name, module in layer.named_modules():
        if isinstance(module, Linear) and recipe.rest.inputs:
            undo.append(module.register_forward_pre_hook(_first(of(name))).remove)
        if isinstance(module, MoE) and recipe.experts.inputs:
            parts = f"{name}.experts.gate_up", f"{name}.experts.down"
            undo.append(_swap(module, RoundedExchange(*(of(part, True) for part in parts))))
    try:
        yield
    finally:
        for back in undo:
            back()


class RoundedExchange(nn.Module):
    """Expert after expert in plain products, with the inputs of both rounded."""

    def __init__(self, before: Round, between: Round) -> None:
        super().__init__()
        self.before, self.between = before, between

    def forward(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, count: int) -> torch.Tensor:
        gate_up, down = experts.gate_up.matrices().data, experts.down.matrices().data
        out = torch.zeros_like(x_TH)
        for expert in range(count):
            rows, choice = (routing.ids == expert).nonzero(as_tuple=True)
            if len(rows):
                inner = self.between(swiglu(self.before(x_TH[rows]) @ gate_up[expert].T))
                out.index_add_(0, rows, (inner @ down[expert].T) * routing.weights[rows, choice, None])
        return out


def _first(change: Round) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (change(args[0]), *args[1:])

    return hook


def _swap(block: MoE, exchange: nn.Module) -> Callable[[], object]:
    before, block.exchange = block.exchange, exchange
    return lambda: setattr(block, "exchange", before)
