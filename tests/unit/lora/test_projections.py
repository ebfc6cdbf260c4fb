from __future__ import annotations

import pytest
from torch import nn

from erniekit.errors import ConfigError
from erniekit.lora.inject import inject
from erniekit.lora.projections import projections, select, short_names
from erniekit.lora.settings import LoRASettings
from erniekit.models import MODELS


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


def test_every_expert_has_its_own_rows_and_names(moe: nn.Module) -> None:
    table = {p.public: p for p in projections(moe)}
    assert len(table) == 4 * 4 + 3 + 3 * 3 + 3 * 8 * 3 + 3
    up = table["model.layers.2.mlp.experts.5.up_proj"]
    assert (up.weight, up.start, up.stop) == ("layers.2.mlp.experts.gate_up.weight", 5 * 48 + 24, 6 * 48)
    assert (up.paddle, up.expert) == ("ernie.layers.2.mlp.experts.5.up_gate_proj", 5)
    shared = table["model.layers.1.mlp.shared_experts.down_proj"]
    assert (shared.module, shared.expert) == ("layers.1.mlp.shared.down", None)
    inject(moe, LoRASettings.resolve(targets=["down_proj", "gate"]), seed=1)
    assert {p.public: p for p in projections(moe)} == table


@pytest.mark.parametrize(
    ("targets", "count", "routers"),
    [
        (None, 16 + 3 + 9 + 72, 0),
        ([".*"], 16 + 3 + 9 + 72, 0),  # matches routers among others: not asked for
        ([r".*gate.*"], 2 + 6 + 48, 0),  # Paddle's up_gate_proj is one of them
        (["gate"], 3, 3),
        (["mlp.gate", "q_proj"], 3 + 4, 3),
        ([r".*layers\.2\..*"], 4 + 3 + 24, 0),
        (["layers.1.mlp.gate"], 1, 1),
        (["up_gate_proj"], 2 + 6 + 48, 0),  # Paddle's fused name
        ([r".*\.shared_experts\..*"], 9, 0),
        ([r".*\.experts\..*\.down_proj"], 24, 0),
    ],
)
def test_routers_are_chosen_only_by_a_target_that_names_nothing_else(
    moe: nn.Module, targets: list[str] | None, count: int, routers: int
) -> None:
    chosen = select(moe, targets)
    assert (len(chosen), sum(p.router for p in chosen)) == (count, routers)


def test_some_experts_of_a_layer_without_the_others_are_refused(moe: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"such as model\.layers\.1\.mlp\.experts\.4\.down_proj, are not") as error:
        select(moe, [r".*\.experts\.[0-3]\.down_proj"])
    assert len(select(moe, [error.value.fix.rpartition(" ")[2]])) == 24  # the way out works as written


def test_layers_that_predict_further_tokens_are_not_adapted() -> None:
    spec = MODELS.get("ernie4_5_moe")
    raw = {
        "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 4,
        "moe_layer_start_index": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    model = spec.build(spec.read_config(raw, "hf", False, "config.json"))
    assert not any("mtp" in p.public for p in projections(model))
    with pytest.raises(ConfigError, match="predict further tokens"):
        select(model, [r".*mtp_block.*"])
