"""PaddleFormers' names: read as our keys with a note, two names of one key agree or are refused with both places."""

from __future__ import annotations

import pytest

from erniekit.cli.config_command import report
from erniekit.config import load
from erniekit.config.flat import KEYS, is_known
from erniekit.config.ignored_keys import IGNORED_KEYS
from erniekit.config.paddleformers import IGNORED, NO_COUNTERPART, RENAMED
from erniekit.errors import ConfigError

# The keys of a recipe of its own, as published with version 1.2.
RECIPE = """
train_dataset_type: messages
train_dataset_path: rows.jsonl
max_seq_len: 8192
packing: false
mix_strategy: concat
template_backend: custom
template: ernie
model_name_or_path: model
_attn_implementation: flashmask
stage: SFT
fine_tuning: lora
lora_rank: 32
per_device_train_batch_size: 1
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
sharding: stage1
save_checkpoint_format: flex_checkpoint
load_via_cpu: true
recompute_granularity: full
recompute_method: uniform
recompute_num_layers: 1
offload_queue: true
neftune: false
neftune_noise_alpha: 5.0
custom_register_path: null
"""


def error(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as e:
        load(list(words))
    return e.value


def test_every_name_leads_to_a_key_or_to_a_reason():
    assert all(key in KEYS or key in IGNORED_KEYS for key in RENAMED.values())
    assert not (set(RENAMED) | set(NO_COUNTERPART)) & (set(KEYS) | set(IGNORED))
    assert not any(is_known(name) for name in NO_COUNTERPART)


def test_its_recipe_is_read_and_each_renamed_key_leaves_a_note(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(RECIPE)
    cfg = load([str(file)])
    assert (cfg.parallel.tensor_parallel_degree, cfg.parallel.pipeline_parallel_degree) == (2, 2)
    notes = [str(n) for n in cfg.notes]
    assert f"tensor_parallel_degree: 2 (tensor_model_parallel_size of PaddleFormers, {file}:15)" in notes
    ignored = {item.key: item.reason for item in cfg.ignored}
    assert "own template" in ignored["template"]
    assert cfg.tuning.neftune is False
    assert ignored["custom_register_path"] == "off, as always here"
    assert any("tensor_model_parallel_size" in line for line in report(cfg))


def test_its_templates_of_pictures_are_chat_templates():
    assert load(["template=ernie_vl"]).vision.chat_template == "paddleformers_vl"
    assert load(["--template", "ernie_vl_nothink"]).vision.chat_template == "paddleformers_vl_nothink"


def test_two_names_with_one_value_are_one_key(tmp_path):
    file = tmp_path / "both.yaml"
    file.write_text("tensor_parallel_degree: 4\ntensor_model_parallel_size: 4\n")
    assert load([str(file)]).parallel.tensor_parallel_degree == 4


def test_two_names_with_two_values_are_refused_with_both_places(tmp_path):
    file = tmp_path / "both.yaml"
    file.write_text("tensor_parallel_degree: 4\nseed: 1\ntensor_model_parallel_size: 2\n")
    found = error(str(file))
    assert (
        found.what
        == "tensor_parallel_degree and tensor_model_parallel_size are both tensor_parallel_degree, with 4 and 2"
    )
    assert found.where == f"{file}:1 and {file}:3"
    typed = error("--max_seq_length", "10", "max_seq_len=20")
    assert typed.where == "flag --max_seq_length and key=value"


def test_a_later_word_may_use_another_name(tmp_path):
    base, file = tmp_path / "base.yaml", tmp_path / "run.yaml"
    base.write_text("tensor_parallel_degree: 4\n")
    file.write_text("base: base.yaml\ntensor_model_parallel_size: 2\n")
    assert load([str(file)]).parallel.tensor_parallel_degree == 2
    assert load([str(file), "tensor_parallel_degree=8"]).parallel.tensor_parallel_degree == 8


def test_what_would_change_a_result_and_has_no_counterpart_is_refused_with_the_reason():
    found = error("binpacking=True")
    assert "packs are made by greedy_intokens" in found.fix
