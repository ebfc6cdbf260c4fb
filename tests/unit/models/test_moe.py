"""The mixture-of-experts block against its definition, token by token; routing rules and capacity; config facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.models import MODELS, costs
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.router import Router

RAW = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 5,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
SPEC = MODELS.get("ernie4_5_moe")


def config(**changes: Any) -> DecoderConfig:
    return SPEC.read_config({**RAW, **changes}, "hf", False, "config.json")


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param, std=0.4)
    return module


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.t()


def by_definition(block: MoE, x: torch.Tensor) -> torch.Tensor:
    out = []
    for token in x.flatten(0, 1):
        probs = (block.router.weight @ token).softmax(-1)
        bias = 0 if block.router.bias is None else block.router.bias
        ids = (probs + bias).topk(2).indices
        weights = probs[ids] / probs[ids].sum()  # the bias chooses, it does not weigh
        gate_up, down = block.experts.gate_up.weight.view(6, 10, 16), block.experts.down.weight.view(6, 16, 5)
        y = sum(w * swiglu(token, gate_up[e], down[e]) for w, e in zip(weights, ids))
        if block.shared is not None:
            y = y + swiglu(token, block.shared.gate_up.weight, block.shared.down.weight)
        out.append(y)
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("changes", [{}, {"moe_num_shared_experts": 0}, {"moe_use_aux_free": False}])
def test_the_block_is_the_weighted_sum_of_a_tokens_experts_plus_the_shared_ones(changes: dict[str, Any]) -> None:
    block = filled(MoE(config(**changes), 1))
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(block(x, None), by_definition(block, x), atol=1e-5, rtol=1e-5)


def test_gradients_of_the_block_are_those_of_the_definition_and_unchosen_experts_have_none() -> None:
    block = filled(MoE(config(), 1))
    with torch.no_grad():
        block.router.bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))  # everybody to the first two experts
    x = torch.randn(2, 5, 16, requires_grad=True)
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    upstream = torch.randn(2, 5, 16)
    got, want = (torch.autograd.grad(y, inputs, upstream) for y in (block(x, None), by_definition(block, x)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    block(x, None).sum().backward()
    assert not block.experts.down.weight.grad.view(6, -1)[2:].any()
    assert block.router.bias.grad is None


def router(capacity: tuple[float, float, float] | None) -> Router:
    c = config()
    assert c.moe is not None
    return filled(Router(replace(c, moe=replace(c.moe, capacity=capacity))))


def test_experts_without_room_drop_the_last_tokens_and_the_rest_is_weighed_anew() -> None:
    gate = router((1.0, 2.0, 3.0))
    with torch.no_grad():
        gate.bias.copy_(torch.tensor([0.0, 9.0, 0, 0, 0, 0]))  # all want expert 1
    x = torch.randn(12, 16)
    routing = gate(x)  # training: floor(1.0 * 12 / 6) = 2 tokens an expert
    kept = (routing.ids == 1).any(-1)
    assert kept.tolist() == [True, True] + [False] * 10
    assert torch.bincount(routing.ids.flatten(), minlength=7)[:6].max() <= 2
    served = (routing.ids < 6).any(-1)
    torch.testing.assert_close(routing.weights.sum(-1), served.float())
    assert not routing.weights[routing.ids == 6].any()


def test_room_depends_on_training_evaluation_and_few_tokens() -> None:
    gate = router((1.0, 2.0, 3.0))
    assert gate.room(60) == 10
    assert gate.eval().room(60) == 20
    assert gate.room(5) == 2  # fewer tokens than experts: floor(3 * 5 / 6)
    assert gate.room(1) == 1  # never none
    assert router(None).room(1000) == 1000


def test_dropped_tokens_pass_through_the_block_as_zeros() -> None:
    c = config(moe_num_shared_experts=0)
    assert c.moe is not None
    block = filled(MoE(replace(c, moe=replace(c.moe, capacity=(0.5, 0.5, 0.5))), 1))
    x = torch.randn(1, 12, 16)  # one token an expert
    y, routing = block(x, None), block.router(x[0])
    lost = (routing.ids == 6).all(-1)
    assert 0 < lost.sum() < 12
    assert not y[0, lost].any()
    assert y[0, ~lost].any(-1).all()


def test_the_router_computes_in_fp32_whatever_the_tokens_are() -> None:
    gate, x = router(None), torch.randn(9, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        routing = gate(x)
    assert routing.logits.dtype == routing.probs.dtype == torch.float32
    assert torch.equal(routing.logits, F.linear(x.float(), gate.weight))
    assert routing.weights.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [1, 2, 3]),
        ({"moe_layer_end_index": 2}, [1, 2]),
        ({"moe_layer_end_index": -1}, [1, 2, 3]),
        ({"moe_layer_end_index": 99}, [1, 2, 3]),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 0}, [1, 3]),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], sparse: list[int]) -> None:
    c = config(**changes)
    assert [i for i in range(4) if c.sparse(i)] == sparse
    model = SPEC.build(c)
    assert [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)] == sparse


@pytest.mark.parametrize("changes", [{}, {"num_nextn_predict_layers": 2}, {"moe_num_shared_experts": 0}])
def test_the_number_of_weights_told_is_the_number_there_are(changes: dict[str, Any]) -> None:
    c = config(**changes)
    assert costs.parameters(c) == sum(p.numel() for p in SPEC.build(c).parameters())
    idle = 3 * (6 - 2) * 3 * 16 * 5  # of three layers, the experts a token does not meet
    plain = config(**{**changes, "num_nextn_predict_layers": 0})
    assert costs.active_parameters(c) == costs.parameters(plain) - idle


def test_a_capacity_that_drops_nobody_is_no_capacity() -> None:
    assert config(moe_capacity=[6, 6, 6]).moe.capacity is None
    assert config(moe_capacity=[1.2, 6, 6]).moe.capacity == (1.2, 6, 6)
