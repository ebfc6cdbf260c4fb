"""Values of a recipe that replace those of config.json: what is read is changed, what nobody reads is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.recipes.model_config import changes_of
from erniekit.recipes.run_plan import open_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


def opened(folder: Path, *words: str):
    return open_model(load([f"model_name_or_path={folder}", "continue_training=False", *words]))


def test_values_take_the_place_of_those_in_config_json(moe):
    folder = opened(moe, "model_config={num_hidden_layers: 3, moe_k: 4}", "model_config.rope_theta=10000")
    assert (folder.config.num_layers, folder.config.moe.choices, folder.config.rope_theta) == (3, 4, 10000.0)
    written = folder.spec.write_config(folder.config, "hf", "float32")
    assert (written["num_hidden_layers"], written["moe_k"]) == (3, 4)
    assert json.loads((moe / "config.json").read_text())["num_hidden_layers"] == 2  # the folder stays as it was


def test_rope_scaling_is_changed_in_a_file_that_has_it_elsewhere(moe):
    folder = opened(moe, "model_config={rope_scaling: {rope_type: linear, factor: 4.0}}")
    assert folder.config.rope_scaling["factor"] == 4.0
    assert folder.config.rope_theta == 500000.0


def test_the_old_name_of_further_layers_and_a_key_of_its_own_for_the_spread(moe):
    folder = opened(moe, "model_config.multi_token_pred_depth=0", "initializer_range=0.002")
    assert (folder.config.mtp_layers, folder.config.init_std) == (0, 0.002)


def test_switches_of_another_implementation_change_nothing(moe):
    cfg = load(["model_config={use_quant_before_a2a: true, fp8_mem_configs: {dequant_input: true}, fuse_rope: true}"])
    assert changes_of(cfg, moe) == {}


def test_a_name_that_nothing_reads_is_refused_with_the_nearest_one(moe):
    with pytest.raises(ConfigError, match="no such value") as e:
        opened(moe, "model_config.num_hiden_layers=3")
    assert "did you mean num_hidden_layers?" in e.value.fix


def test_a_key_of_the_recipe_is_sent_there(moe):
    with pytest.raises(ConfigError, match="is a key of the recipe"):
        opened(moe, "model_config.moe_z_loss_lambda=1e-3")


def test_a_value_of_the_wrong_kind_is_refused_by_the_model(moe):
    with pytest.raises(Exception, match="needs a positive integer 'num_hidden_layers'"):
        opened(moe, "model_config.num_hidden_layers=many")
