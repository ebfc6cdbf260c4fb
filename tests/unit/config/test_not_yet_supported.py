"""What a later version brings is listed for any recipe and refused by name when it is run."""

from __future__ import annotations

import pytest

from erniekit.config import load, need, not_yet_supported, refuse_not_yet_supported
from erniekit.config.flat import KEYS
from erniekit.config.not_yet_supported import LIST
from erniekit.errors import ConfigError, NotYetSupportedError


@pytest.mark.parametrize(
    "word",
    [
        "stage=OCR-VL-SFT",
        "compute_type=fp16",
        "moe_group_experts=1",
        "moe_dropout_prob=0.1",
        "dataset_type=map",
        "use_global_causal_attn=1",
        "model_config={use_fp8_mlp: true}",
        "optim=adafactor",
        "attention_probs_dropout_prob=0.1",
    ],
)
def test_it_resolves_and_is_refused_by_name(word):
    cfg = load([word])
    key = word.partition("=")[0]
    assert key in {item.key for item in not_yet_supported(cfg)}
    with pytest.raises(NotYetSupportedError) as e:
        refuse_not_yet_supported(cfg)
    assert key in e.value.where
    assert e.value.fix


@pytest.mark.parametrize("kind", ["wint8", "wint4/8", "nf4"])
def test_packed_weights_train_and_are_evaluated(kind):
    refuse_not_yet_supported(load([f"compute_type={kind}"]))
    refuse_not_yet_supported(load([f"compute_type={kind}"], "eval"))


def test_a_chat_packs_by_words_it_knows_and_says_that_others_change_nothing():
    assert not not_yet_supported(load(["quantization=wint4"], "chat"))
    (item,) = not_yet_supported(load(["quantization=awq"], "chat"))
    assert "used as stored" in item.today
    assert not item.stops


def test_a_plain_run_needs_nothing():
    cfg = load(["--data", "a.jsonl", "model_name_or_path=m"])
    assert not_yet_supported(cfg) == []
    refuse_not_yet_supported(cfg)


@pytest.mark.parametrize(
    "words",
    [
        "tensor_parallel_degree=2 sequence_parallel=1",
        "pipeline_parallel_degree=2 virtual_pp_degree=2 gradient_accumulation_steps=2 pp_schedule=zero_bubble",
        "pipeline_parallel_degree=2 pp_seg_method=[0,29,57]",
        "sharding=stage1",
        "sharding=stage2 sharding_parallel_degree=4",
        "sharding=stage3,offload",
        "data_parallel_degree=2",
        "sep_parallel_degree=2",
        "context_parallel_degree=2",
        "offload_optim=1 tensorwise_offload_optimizer=1 recompute=1 offload_recompute_inputs=1",
        "model_name_or_path=baidu/ERNIE-4.5-21B-A3B-Paddle moe_use_aux_free=0 use_recompute_moe=1",
        "num_nextn_predict_layers=1 use_recompute_mtp=1",
        "ckpt_quant_stage=O2 unified_checkpoint_config=async_save,remove_master_weight",
    ],
)
def test_layouts_offload_and_compression_are_of_this_version(words):
    assert not_yet_supported(load(words.split())) == []


def test_what_changes_no_result_is_listed_but_does_not_stop():
    cfg = load(["pipeline_parallel_config=use_dualpipev,enable_timer"])
    (item,) = not_yet_supported(cfg)
    assert (item.value, item.stops) == ("use_dualpipev", False)
    refuse_not_yet_supported(cfg)


def test_commands_that_use_one_process_say_so_and_run():
    refuse_not_yet_supported(load(["tensor_parallel_degree=8", "compute_type=wint4/8"], "export"))
    for command in ("eval", "chat"):
        cfg = load(["tensor_parallel_degree=8"], command)
        assert [(item.key, item.stops) for item in not_yet_supported(cfg)] == [("tensor_parallel_degree", False)]


def test_every_row_names_declared_keys():
    assert {key for rows in LIST.values() for row in rows for key in row.keys} <= set(KEYS)


def test_needed_keys_are_asked_for_with_their_help():
    with pytest.raises(ConfigError) as e:
        need(load([]), "model_name_or_path", "train_dataset_path")
    assert "model_name_or_path and train_dataset_path" in e.value.what
    assert "hub id" in e.value.fix
