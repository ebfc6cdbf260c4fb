"""config.json in and out: both worlds' spellings, the released sizes, and settings that are refused, not ignored."""

from __future__ import annotations

import pytest

from erniekit.errors import CheckpointError
from erniekit.models import MODELS, costs, find

ERNIE_03B = {
    "model_type": "ernie4_5",
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LLAMA_13B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}


def read(raw: dict, layout: str = "hf", has_head: bool = False):
    return find(raw).read_config(raw, layout, has_head, "here/config.json")


@pytest.mark.parametrize(("raw", "count"), [(ERNIE_03B, 360_748_032), (LLAMA_13B, 13_015_864_320)])
def test_released_shapes_have_their_published_parameter_counts(raw, count):
    assert costs.parameters(read(raw)) == count


ERNIE_21B = {
    **ERNIE_03B, "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True,
    "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1,
}  # fmt: skip
ERNIE_300B = {
    **ERNIE_21B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 54, "num_attention_heads": 64,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "moe_k": 8, "moe_intermediate_size": 3584,
    "moe_num_shared_experts": 0, "moe_layer_start_index": 3, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "total", "active"),
    [(ERNIE_21B, 21_825_437_888, 3_352_150_208), (ERNIE_300B, 300_474_051_776, 47_926_586_560)],
)
def test_models_with_experts_have_their_published_total_and_active_counts(raw, total, active):
    assert (costs.parameters(read(raw)), costs.active_parameters(read(raw))) == (total, active)


def test_paddles_dense_ernie_called_moe_without_experts_is_dense():
    assert find({"model_type": "ernie4_5_moe", "moe_num_experts": 0}) is MODELS.get("ernie4_5")


def test_an_unknown_model_type_names_the_known_ones():
    with pytest.raises(CheckpointError) as caught:
        find({"model_type": "gpt2"}, "there/config.json")
    assert caught.value.where == "there/config.json"
    assert "ernie4_5" in caught.value.fix
    assert "llama" in caught.value.fix


@pytest.mark.parametrize("bad", [None, 0, -3, "1024", True, 2.5])
def test_a_size_that_is_no_positive_integer_is_an_error_with_its_key(bad):
    with pytest.raises(CheckpointError, match="'hidden_size'"):
        read({**ERNIE_03B, "hidden_size": bad})


def test_head_dim_defaults_as_each_world_does():
    raw = {k: v for k, v in ERNIE_03B.items() if k != "head_dim"}
    assert read(raw, "hf").head_dim == 128
    assert read({**raw, "hidden_size": 512}, "paddle").head_dim == 32
    assert read(LLAMA_13B).head_dim == 128


def test_tying_follows_the_field_and_otherwise_the_files():
    raw = {k: v for k, v in ERNIE_03B.items() if k != "tie_word_embeddings"}
    assert read(raw, has_head=False).tie_word_embeddings
    assert not read(raw, has_head=True).tie_word_embeddings
    assert read(ERNIE_03B, has_head=True).tie_word_embeddings
    assert not read(LLAMA_13B).tie_word_embeddings


@pytest.mark.parametrize(
    ("extra", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, ("linear", 2.0)),
        ({"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, 10000.0, ("linear", 4.0)),
        ({"rope_scaling_type": None, "rope_scaling_factor": 1.0}, 10000.0, None),
    ],
)
def test_rope_is_read_from_every_place_the_worlds_keep_it(extra, theta, scaling):
    config = read({**LLAMA_13B, **extra})
    assert config.rope_theta == theta
    if scaling is None:
        assert config.rope_scaling is None
    else:
        assert (config.rope_scaling["rope_type"], config.rope_scaling["factor"]) == scaling


def test_two_rope_scalings_that_differ_are_refused():
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="rope_scaling is"):
        read({**LLAMA_13B, **nested, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert read({**LLAMA_13B, **nested, "rope_scaling": {"rope_type": "default"}}).rope_scaling is None


def test_ernies_compression_ratio_is_linear_scaling_and_comes_back():
    config = read({**ERNIE_03B, "compression_ratio": 4.0}, "paddle", True)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    spec = MODELS.get("ernie4_5")
    hf = spec.write_config(config, "hf", "float32")
    assert hf["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    again = spec.write_config(read(hf), "paddle", "float32")
    assert again["compression_ratio"] == 4.0


@pytest.mark.parametrize(
    ("raw", "extra", "named"),
    [
        (ERNIE_03B, {"hidden_act": "gelu"}, "hidden_act"),
        (ERNIE_03B, {"use_rmsnorm": False}, "use_rmsnorm"),
        (LLAMA_13B, {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA_13B, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (LLAMA_13B, {"rope_scaling_type": "dynamic_ntk"}, "dynamic_ntk"),
    ],
)
def test_arithmetic_we_do_not_have_is_refused(raw, extra, named):
    with pytest.raises(CheckpointError, match=named):
        read({**raw, **extra})


@pytest.mark.parametrize("raw", [ERNIE_03B, LLAMA_13B])
@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_a_written_config_reads_back_the_same(raw, layout):
    odd = {"head_dim": 96, "num_key_value_heads": 8, "rope_theta": 12345.0, "rms_norm_eps": 1e-7, "eos_token_id": 5}
    config = read({**raw, **odd})
    back = find(raw).write_config(config, layout, "bfloat16")
    assert read(back, layout) == config.__class__(**{**config.__dict__, "raw_layout": layout})


@pytest.mark.parametrize("raw", [ERNIE_03B, LLAMA_13B])
def test_a_list_of_end_tokens_survives_a_round_trip(raw):
    config = read({**raw, "eos_token_id": [2, 7]})
    assert config.eos_id == 2
    assert find(raw).write_config(config, "hf", "float32")["eos_token_id"] == [2, 7]


def test_keys_we_do_not_know_travel_with_a_config_of_the_same_layout():
    config = read({**ERNIE_03B, "a_key_of_theirs": 3})
    spec = MODELS.get("ernie4_5")
    assert spec.write_config(config, "hf", "float32")["a_key_of_theirs"] == 3
    assert "a_key_of_theirs" not in spec.write_config(config, "paddle", "float32")
