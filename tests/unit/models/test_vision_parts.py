"""Which weights of a vision-language model a run leaves as they are, and the tower's learning rates layer by layer."""

from __future__ import annotations

import pytest
import torch

from erniekit.model_contract import front_prefixes
from erniekit.models import MODELS
from erniekit.models.vision_parts import freeze, part_of, tower_lr_scale
from erniekit.optim.groups import make_groups
from parity.test_vl_layouts import SHAPE

SPEC = MODELS.get("ernie4_5_vl_moe")


def trained(*words: str) -> set[str]:
    with torch.device("meta"):
        model = SPEC.build(SHAPE)
    freeze(model, words)
    return {name for name, param in model.named_parameters() if param.requires_grad}


def test_every_weight_but_the_routers_bias_is_trained_unless_a_word_says_else() -> None:
    everything = trained()
    assert {part_of(name) for name in everything} == {"tower", "resampler", "vision", "text"}
    assert everything - trained("freeze_vision") == {n for n in everything if n.startswith("tower.")}
    assert everything - trained("freeze_resampler") == {n for n in everything if n.startswith("resampler.")}


def test_without_the_language_model_what_sees_and_its_experts_are_trained() -> None:
    left = trained("freeze_lm", "freeze_vision")
    assert {n for n in left if n.startswith("layers.1.")} == {
        f"layers.1.mlp.vision.{part}.weight" for part in ("router", "experts.gate_up", "experts.down")
    }
    assert {n.partition(".")[0] for n in left} == {"layers", "resampler"}


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("tower.patch.weight", 0.25),
        ("tower.blocks.0.attn.qkv.weight", 0.25),
        ("tower.blocks.1.mlp.fc1.bias", 0.5),
        ("tower.blocks.2.norm1.weight", 1.0),
        ("tower.ln.weight", 1.0),
        ("resampler.proj.weight", 1.0),
        ("layers.0.attn.qkv.weight", 1.0),
    ],
)
def test_a_layer_of_the_tower_learns_at_a_share_of_the_next(name: str, scale: float) -> None:
    assert tower_lr_scale(name, 3, 0.5) == scale
    assert tower_lr_scale(name, 3, None) == 1.0


def test_what_sees_comes_before_the_first_layer_where_rates_fall_towards_it() -> None:
    with torch.device("meta"):
        model = SPEC.build(SHAPE)
    named, front = list(model.named_parameters()), front_prefixes(model)
    scales = {n: g.lr_scale for g in make_groups(named, 3, 0.1, layerwise_bound=0.5, front=front) for n in g.names}
    assert scales["tower.patch.weight"] == scales["resampler.proj.weight"] == scales["embed.weight"] == 0.5
    assert scales["norm.weight"] == 1.0
