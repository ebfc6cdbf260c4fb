from __future__ import annotations

import pytest
from torch import nn

from erniekit.errors import ConfigError
from erniekit.lora.inject import inject
from erniekit.lora.projections import projections, select, short_names
from erniekit.lora.settings import LoRASettings


def test_each_projection_knows_its_rows_and_its_names_elsewhere(ernie: nn.Module) -> None:
    table = {p.public: p for p in projections(ernie)}
    assert len(table) == 3 * 7
    k = table["model.layers.2.self_attn.k_proj"]
    assert (k.weight, k.start, k.stop, k.in_features) == ("layers.2.attn.qkv.weight", 128, 192, 64)
    assert k.paddle == "ernie.layers.2.self_attn.qkv_proj"
    assert table["model.layers.0.mlp.up_proj"].start == 64  # gate rows come first
    assert table["model.layers.0.self_attn.o_proj"].module == "layers.0.attn.out"


def test_the_table_is_the_same_after_injection(ernie: nn.Module) -> None:
    before = projections(ernie)
    inject(ernie, LoRASettings.resolve(), seed=1)
    assert projections(ernie) == before


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (["q_proj"], 3),
        (["q_proj", "v_proj"], 6),
        (["qkv_proj"], 9),  # Paddle's fused name means its three parts
        ([".*qkv_proj.*", ".*o_proj.*", ".*up_gate_proj.*", ".*down_proj.*"], 21),
        ([r".*layers\.[01]\..*"], 14),
        (["layers.1.mlp.down_proj"], 1),
        ([".*"], 21),
    ],
)
def test_targets_are_names_dotted_ends_or_regexes(ernie: nn.Module, targets: list[str], count: int) -> None:
    assert len(select(ernie, targets)) == count


def test_a_target_that_matches_nothing_is_refused_with_the_nearest_names(ernie: nn.Module) -> None:
    with pytest.raises(ConfigError, match="matches no layer") as error:
        select(ernie, ["q_proj", "qproj"])
    assert "q_proj" in error.value.fix
    assert error.value.where == "lora_target_modules"


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens", ".*norm.*", "input_layernorm"])
def test_head_embeddings_and_norms_are_refused_with_the_reason(ernie: nn.Module, target: str) -> None:
    with pytest.raises(ConfigError, match="does not adapt") as error:
        select(ernie, [target])
    assert "fine_tuning: Full" in error.value.fix


def test_a_broken_regex_is_refused_by_name(ernie: nn.Module) -> None:
    with pytest.raises(ConfigError, match="regular expression"):
        select(ernie, ["*_proj"])


def test_targets_are_written_short_when_every_layer_has_them(ernie: nn.Module) -> None:
    everywhere = [p.public for p in select(ernie, ["q_proj", "up_proj"])]
    assert short_names(everywhere, ernie) == ["q_proj", "up_proj"]
    assert short_names(everywhere[1:], ernie) == sorted(everywhere[1:])
