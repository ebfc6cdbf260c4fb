"""Typed conversion: whatever form a value comes in, the key's declared type comes out, or a clear error."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.config.convert import convert
from erniekit.config.flat import KEYS
from erniekit.errors import ConfigError


def value_of(name, value):
    return convert(KEYS[name], value, "here")


@pytest.mark.parametrize("given", ["5e-7", "5.0e-07", 5e-7, "0.0000005"])
def test_numbers_in_any_notation_become_floats(given):
    assert value_of("learning_rate", given) == 5e-7


@pytest.mark.parametrize("given", [6000000, 6000000.0, "6000000.0", "6e6", "6_000_000", " 6000000 "])
def test_whole_numbers_written_as_floats_become_ints(given):
    out = value_of("num_samples_each_epoch", given)
    assert out == 6_000_000
    assert isinstance(out, int)


def test_an_int_given_to_a_float_key_becomes_a_float():
    assert isinstance(value_of("num_train_epochs", 1), float)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, True), ("1", True), (1, True), ("True", True), ("on", True), ("0", False), ("False", False), (0, False)],
)
def test_truth_in_any_spelling(given, expected):
    assert value_of("recompute", given) is expected


def test_lists_come_from_commas_spaces_brackets_or_lists():
    assert value_of("no_recompute_layers", "[0, 4,5]") == (0, 4, 5)
    assert value_of("no_recompute_layers", "0 4 5") == (0, 4, 5)
    assert value_of("no_recompute_layers", [0, 4, 5]) == (0, 4, 5)
    assert value_of("train_dataset_prob", "0.2, 0.8") == (0.2, 0.8)
    assert value_of("train_dataset_prob", 1.0) == (1.0,)


def test_paths_may_hold_spaces_and_in_a_list_commas():
    assert value_of("train_dataset_path", "my data/a.jsonl, b.jsonl") == ("my data/a.jsonl", "b.jsonl")
    assert value_of("train_dataset_path", ["odd, name.jsonl"]) == ("odd, name.jsonl",)


@pytest.mark.parametrize(
    ("given", "proposed"),
    [
        ("cuda", "did you mean gpu?"),
        ("CUDA", "did you mean gpu?"),
        ("cuda:0", "did you mean gpu? CUDA_VISIBLE_DEVICES=0 chooses the card"),
        ("gpu:3", "did you mean gpu? CUDA_VISIBLE_DEVICES=3 chooses the card"),
        ("npu:1", "did you mean npu? ASCEND_RT_VISIBLE_DEVICES=1 chooses the card"),
        ("rocm", "did you mean amd?"),
        ("cpu:0", "did you mean cpu?"),
        ("gpus", "did you mean gpu?"),
    ],
)
def test_torchs_names_of_devices_are_refused_with_ours(given: str, proposed: str) -> None:
    with pytest.raises(ConfigError, match="device is") as refused:
        value_of("device", given)
    assert refused.value.fix == proposed


def test_a_device_that_resembles_none_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError) as refused:
        value_of("device", "quantum:0")
    assert refused.value.fix.startswith("gpu, cpu, or a vendor's name")


@pytest.mark.parametrize("name", ["output_dir", "train_dataset_path", "model_name_or_path"])
def test_a_text_with_a_nul_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} holds a NUL character") as error:
        value_of(name, "a\0b")
    assert error.value.where == "here"
    assert "leave" in error.value.fix


def test_report_to_none_is_an_empty_list():
    assert value_of("report_to", "none") == ()
    assert value_of("report_to", "tensorboard,wandb") == ("tensorboard", "wandb")


def test_the_word_none_means_no_value_where_one_may_be_missing():
    assert value_of("output_dir", "None") is None
    assert value_of("eval_steps", "") is None
    assert value_of("train_dataset_path", "") == ()


def test_an_empty_text_stays_an_empty_text():
    assert value_of("moe_multimodal_dispatch_use_allgather", "") == ""


def test_choices_ignore_case_and_read_yaml_booleans():
    assert value_of("fine_tuning", "lora") == "LoRA"
    assert value_of("doctor", False) == "off"
    assert value_of("doctor", True) == "on"
    assert value_of("evaluation_strategy", False) == "no"


def test_a_mapping_may_be_written_as_text():
    assert value_of("limit_mm_per_prompt", '{"image": 100, "video": 100}') == {"image": 100, "video": 100}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("max_steps", "three"),
        ("max_steps", 2.5),
        ("max_steps", True),
        ("max_steps", None),
        ("max_steps", [1]),
        ("learning_rate", "nan"),
        ("learning_rate", -1),
        ("recompute", "maybe"),
        ("batch_size", 0),
        ("top_p", 1.5),
        ("compute_type", "int3"),
        ("seed", {"a": 1}),
        ("model_config", "12"),
        ("pipeline_parallel_config", "no_such_word"),
        ("train_dataset_prob", "half"),
        ("output_dir", ["a", "b"]),
    ],
)
def test_a_wrong_type_names_the_key_the_place_what_came_and_what_is_expected(name, given):
    with pytest.raises(ConfigError) as e:
        value_of(name, given)
    assert name in e.value.what
    assert "expected" in e.value.what
    assert e.value.where == "here"
    assert e.value.fix


def test_a_near_choice_is_suggested():
    with pytest.raises(ConfigError) as e:
        value_of("lr_scheduler_type", "cosin")
    assert "did you mean cosine" in e.value.fix


def test_a_secret_is_not_repeated_in_an_error():
    with pytest.raises(ConfigError) as e:
        value_of("wandb_api_key", {"token": "hush"})
    assert "hush" not in str(e.value)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("compute_type=mxfp4", "frozen_base: mxfp4, with compute_type: bf16"),
        ("frozen_base=wint8", "int8, which is what compute_type: wint8 means"),
        ("quant=q4_0", "erniekit export format=gguf gguf_type=q4_0"),
    ],
)
def test_a_value_of_another_key_is_refused_with_the_key_that_takes_it(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([word])
    assert error.value.fix == fix
