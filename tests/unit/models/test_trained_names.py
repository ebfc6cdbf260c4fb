"""Which weights patterns leave to train, and what is said of patterns that mean nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erniekit.demo.tiny import FAMILIES, SHAPE
from erniekit.errors import ConfigError
from erniekit.models import MODELS
from erniekit.models.trained_names import set_trained


def model(family: str = "ernie4_5") -> nn.Module:
    raw = {"model_type": family, **SHAPE, **FAMILIES[family]}
    spec = MODELS.get(family)
    with torch.device("meta"):
        return spec.build(spec.read_config(raw, "hf", not raw["tie_word_embeddings"], "test"))


def trained(made: nn.Module) -> list[str]:
    return [name for name, param in made.named_parameters() if param.requires_grad]


def test_a_beginning_of_a_name_means_all_below_it_in_the_words_of_files_or_in_ours() -> None:
    for pattern in ("model.layers.1", "layers.1", "model.layers.1.*", "*layers.[1-9]"):
        made = model()
        set_trained(made, [pattern], [])
        assert trained(made) == [n for n, _ in made.named_parameters() if n.startswith("layers.1.")], pattern


def test_freeze_takes_weights_out_of_what_train_only_leaves() -> None:
    made = model()
    set_trained(made, ["model.layers.*"], ["*norm*", "*.mlp"])
    assert trained(made) == [f"layers.{i}.attn.{n}.weight" for i in (0, 1) for n in ("qkv", "out")]


def test_layers_that_predict_further_tokens_are_trained_alone() -> None:
    made = model("ernie4_5_moe")
    set_trained(made, ["mtp"], [])
    assert trained(made)
    assert all(name.startswith("mtp.") for name in trained(made))


def test_parts_of_a_fused_tensor_are_named_together() -> None:
    made = model()
    set_trained(made, ["*.q_proj", "*.k_proj", "*.v_proj"], [])
    assert trained(made) == ["layers.0.attn.qkv.weight", "layers.1.attn.qkv.weight"]
    with pytest.raises(ConfigError, match=r"q_proj.weight is one tensor with k_proj.weight, v_proj.weight") as raised:
        set_trained(model(), [], ["*.q_proj"])
    assert raised.value.fix == "name all of them: *.q_proj,*.k_proj,*.v_proj"


@pytest.mark.parametrize(
    ("train_only", "freeze", "what", "fix"),
    [
        (["model.layer.1"], [], "'model.layer.1' matches no weight", "model.layers.1"),
        ([], ["lm_haed"], "'lm_haed' matches no weight", "names look like model.embed_tokens.weight"),
        (["lm_head"], [], "'lm_head' matches no weight", "tied to the embedding"),
        (["mtp"], [], "'mtp' matches no weight", "no layers that predict further tokens"),
        (["model.norm"], ["*norm*"], "no weight is left to train", "take a pattern out"),
    ],
)
def test_patterns_that_leave_nothing_are_refused_with_the_way_out(
    train_only: list[str], freeze: list[str], what: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=what) as raised:
        set_trained(model(), train_only, freeze)
    assert fix in raised.value.fix


def test_a_pattern_for_weights_that_rest_says_which_key_trains_them() -> None:
    made = model("ernie4_5_moe")
    made.get_submodule("mtp").requires_grad_(False)
    with pytest.raises(ConfigError, match="only weights that this run does not train") as raised:
        set_trained(made, ["mtp"], [])
    assert "num_nextn_predict_layers" in raised.value.fix
