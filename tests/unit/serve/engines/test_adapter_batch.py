"""A batch whose rows are of several adapters gives each row what its own model alone gives it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erniekit.demo.tiny import FAMILIES, SHAPE
from erniekit.lora.settings import LoRASettings
from erniekit.models import MODELS
from erniekit.models.init import init_weights
from erniekit.models.layers.attention import Context
from erniekit.models.layers.moe import MoE
from erniekit.serve.engines.adapter_batch import AdapterExchange, AdapterRows, batchable, joined
from support.engine_jobs import inject_drawn

NO_CONTEXT = Context(None, None, None, None)  # type: ignore[arg-type]


def built(family: str) -> nn.Module:
    spec = MODELS.get(family)
    raw = {"model_type": family, **SHAPE, **FAMILIES[family]}
    model = spec.build(spec.read_config(raw, "hf", False, "here"))
    init_weights(model, 0, 0.1)
    return model.eval().requires_grad_(False)


def adapted(base: nn.Module, seed: int, settings: LoRASettings) -> nn.Module:
    model = built("ernie4_5_moe")
    model.load_state_dict(base.state_dict())
    inject_drawn(model, settings, seed)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """Of different ranks, scales and projections; one with an adapter on the router, too."""
    base = built("ernie4_5_moe")
    return {
        "a": adapted(base, 1, LoRASettings(4, 8.0)),
        "base": base,
        "b": adapted(base, 2, LoRASettings(7, 3.0)),
        "down": adapted(base, 3, LoRASettings(2, 4.0, targets=("down_proj",))),
        "router": adapted(base, 4, LoRASettings(3, 6.0, targets=("gate", "up_proj"))),
    }


@torch.no_grad()
def test_rows_of_experts_are_those_of_each_model_alone(models: dict[str, nn.Module]):
    rows = AdapterRows()
    assert batchable(models) == list(models)
    together = joined(models, rows)
    block = together.layers[1].mlp
    assert type(block) is MoE
    assert isinstance(block.exchange, AdapterExchange)
    torch.manual_seed(5)
    x = torch.randn(1, 33, SHAPE["hidden_size"])
    rows.of = torch.randint(0, len(models), (33,))
    found = block(x, NO_CONTEXT)[0]
    each = torch.stack([model.layers[1].mlp(x, NO_CONTEXT)[0] for model in models.values()])
    expected = each[rows.of, torch.arange(33)]
    assert (each - each[1]).abs().amax((1, 2)).sort().values[1] > 0.01, "an adapter changes nothing"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_batch_of_one_model_is_that_model(models: dict[str, nn.Module]):
    rows = AdapterRows()
    assert batchable(models) == list(models)
    together = joined(models, rows)
    ids = torch.randint(5, 1000, (1, 20))
    for number, model in enumerate(models.values()):
        rows.of = torch.full((20,), number)
        # Logits of a whole model in fp32, rounded a few times more than one layer.
        torch.testing.assert_close(together(ids), model(ids), atol=1e-4, rtol=1e-4)


def test_models_that_cannot_be_joined_are_left_apart(models: dict[str, nn.Module]):
    assert batchable({"base": models["base"]}) == [], "one model"
    assert batchable({"a": models["a"], "b": models["b"]}) == [], "no base"
    dora = adapted(models["base"], 5, LoRASettings(2, 4.0, targets=("q_proj", "v_proj"), dora=True))
    assert batchable({"base": models["base"], "dora": dora}) == [], "its rows have lengths of their own"
    assert batchable({"dora": dora, "base": models["base"], "a": models["a"]}) == ["base", "a"]
