"""DoRA before it has learned: just the base model, whatever it computes in."""

from __future__ import annotations

import pytest
import torch

from erniekit.lora.adapter import LowRank
from erniekit.lora.dora import DoRALinear
from erniekit.lora.layers import Pair
from erniekit.lora.merge import WeightUpdate, merged_in_fp32
from erniekit.lora.start_values import start_from_weights
from erniekit.models.layers.linear import Linear

ROWS, WIDTH, RANK = 300, 128, 4


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def layer(request: pytest.FixtureRequest) -> DoRALinear:
    torch.manual_seed(0)
    base = Linear(WIDTH, ROWS).to(getattr(torch, request.param))
    pair = Pair((("proj", ROWS),), RANK, 2.0, base.weight, magnitudes=True)
    made = DoRALinear(base, (("proj", ROWS),), {"proj": pair})
    with torch.no_grad():
        pair.A.normal_()
    start_from_weights(torch.nn.ModuleDict({"proj": made}), lambda name: base.weight, seed=0, iterations=0)
    return made


def test_a_new_dora_layer_answers_as_the_layer_below_it_bit_for_bit(layer: DoRALinear) -> None:
    x = torch.randn(7, WIDTH).to(layer.weight.dtype)
    assert torch.equal(layer(x), layer.base(x))
    with torch.no_grad():
        layer.pairs()["proj"].magnitude.mul_(1.5)
    assert not torch.equal(layer(x), layer.base(x)), "its lengths are read"


def test_a_new_dora_adapter_merges_to_the_weight_it_was_made_for(layer: DoRALinear) -> None:
    pair = layer.pairs()["proj"]
    update = LowRank(pair.A.detach(), pair.B.detach(), pair.scale, pair.magnitude.detach())
    merged = merged_in_fp32(layer.weight.detach(), [WeightUpdate(0, ROWS, update)])
    assert torch.equal(merged.to(layer.weight.dtype), layer.weight)
