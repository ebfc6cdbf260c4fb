"""Layers that round their products in training: compiled whole they round and remember as they do as written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from erniekit.kernels.moe_permute import by_expert
from erniekit.kernels.stored.fp8_static import StaticFormat
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.rounding import BlockRounding, StaticRounding

T, H, W, E, K = 12, 32, 16, 3, 2


def static(layer: Any, experts: int = 1) -> None:
    layer.rounding = StaticRounding(StaticFormat())
    layer.rounding.give_memory(experts, torch.device("cpu"))
    layer.rounding.weight_scale.fill_(float(layer.weight.detach().abs().max()) / 448)
    layer.rounding.input_scale.fill_(4 / 448)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.experts = MLP(H, W, bias=False), Experts(E, H, W)
        for weight in (self.experts.gate_up.weight, self.experts.down.weight):
            nn.init.normal_(weight, std=0.3)
        for layer, count in self.layers():
            if kind == "static":
                static(layer, count)
            else:
                layer.rounding = BlockRounding()

    def layers(self) -> list[tuple[Any, int]]:
        return [(self.mlp.gate_up, 1), (self.mlp.down, 1), (self.experts.gate_up, E), (self.experts.down, E)]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.experts(x, by_expert(ids, E), weights)


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.rand(T, E).topk(K).indices
    return torch.randn(T, H), ids, torch.rand(T, K)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["static", "blocks"])
def test_a_compiled_block_is_one_graph_and_rounds_the_same(kind: str) -> None:
    x, ids, weights = given()
    answers = []
    for compiled in (False, True):
        block = Block(kind)
        run: Any = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else block
        rows = x.clone().requires_grad_()
        run(rows, ids, weights).square().sum().backward()
        seen = [layer.rounding.most for layer, _ in block.layers()] if kind == "static" else []
        answers.append([rows.grad, *(p.grad for p in block.parameters()), *seen])
    for plain, other in zip(*answers, strict=True):
        torch.testing.assert_close(other, plain)
    assert all(float(most) > 0 for most in answers[0][5:])


def test_answers_are_weighted_and_not_what_is_rounded() -> None:
    """A routing weight does not change what the second product rounds: half of it is half the answer."""
    x, ids, weights = given()
    experts = Block("static").experts
    order = by_expert(ids, E)
    whole, half = (experts(x, order, weights * share) for share in (1.0, 0.5))
    torch.testing.assert_close(half, whole / 2, atol=1e-6, rtol=1e-6)
    assert float(experts.down.rounding.most) > 0
