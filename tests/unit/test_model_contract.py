"""Every family keeps to model_contract.py: what is named there is there. mypy checks the types of both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.demo.tiny_vision import make_tiny_vision
from erniekit.model_contract import (
    BiasAdder,
    DecoderBlock,
    ExpertBank,
    ExpertBlock,
    InnerPart,
    PictureTower,
    SpreadModel,
    Tower,
    WeightHolder,
    bias_adder,
    picture_tower,
    weight_holder,
    wrap,
)
from erniekit.models import MODELS


def missing(protocol: Any, thing: Any) -> set[str]:
    named = {name for base in protocol.__mro__ for name in (*getattr(base, "__annotations__", ()), *vars(base))}
    return {name for name in named if not name.startswith("_") and not hasattr(thing, name)}


@pytest.mark.parametrize("family", list(MODELS))
def test_a_family_has_all_that_the_contract_names(family: str, tmp_path: Path) -> None:
    vision = family == "ernie4_5_vl_moe"
    folder = make_tiny_vision(tmp_path) if vision else make_tiny_model(tmp_path, family=family)
    with torch.device("meta"):
        found = ModelFolder(folder)
        model: Any = found.spec.build(found.config)
    assert not missing(SpreadModel, model)
    assert (picture_tower(model) is not None) == vision
    names = [name for name, _ in model.named_parameters()]
    for name, tower in model.towers().items():
        assert tower.name == name
        assert not missing(PictureTower if tower is picture_tower(model) else Tower, tower)
        for prefix in tower.prefixes:
            assert any(one.startswith(prefix) for one in names)
        assert set(tower.adapts) <= set(tower.prefixes)
    blocks = list(model.blocks())
    assert len(blocks) >= found.config.num_layers
    holders = [holder for holder in map(weight_holder, model.modules()) if holder is not None]
    assert len(holders) >= 4 * found.config.num_layers
    assert not any(missing(WeightHolder, holder) for holder in holders)
    for block in blocks:
        assert not missing(DecoderBlock, block)
        assert not missing(InnerPart, block.attn.inner)
        assert not missing(BiasAdder, bias_adder(block.attn.out))
        if block.sparse:
            assert not missing(ExpertBlock, block.mlp)
            assert not any(missing(ExpertBank, bank) for bank in block.mlp.banks())


def test_what_is_wrapped_computes_through_the_wrapper() -> None:
    layer = torch.nn.Identity()
    wrap(layer, lambda plain: lambda x: plain(x) + 1)
    wrap(layer, lambda plain: lambda x: plain(x) * 10)
    assert layer(2) == 30
