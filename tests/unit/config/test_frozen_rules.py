"""frozen_base, compute_type and weight_quantize_algo are one decision, and frozen_products fits it."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError


def said(cfg, key):
    return [str(note) for note in cfg.notes if note.key == key and not note.quiet]


@pytest.mark.parametrize(
    ("words", "base"),
    [
        (["compute_type=wint8"], "int8"),
        (["compute_type=wint4/8"], "wint4/8"),
        (["compute_type=nf4"], "nf4"),
        (["--weight_quantize_algo", "weight_only_mix"], "wint4/8"),
        (["--weight_quantize_algo", "weight_only_int8"], "int8"),
        (["--weight_quantize_algo", "weight_only_int4"], "int4"),
        (["--weight_quantize_algo", "nf4"], "nf4"),
        (["compute_type=wint8", "frozen_base=int8"], "int8"),
        (["compute_type=fp32", "frozen_base=wint4/8"], "wint4/8"),
        (["compute_type=bf16"], "bf16"),
    ],
)
def test_every_way_to_say_it_sets_the_base(words, base):
    cfg = load(words)
    assert cfg.lora.frozen_base == base
    assert cfg.lora.packed_base is (base != "bf16")
    given = any("frozen_base" in word for word in words)
    assert len(said(cfg, "frozen_base")) == (0 if given or base == "bf16" else 1)


def test_what_a_mix_means_is_said():
    (text,) = said(load(["compute_type=wint4/8"]), "frozen_base")
    for words in ("int4: routed experts", "int8: attention and dense feed-forward", "shared experts, head", "bf16"):
        assert words in text


@pytest.mark.parametrize(
    "words", [["compute_type=wint4/8", "frozen_base=int8"], ["compute_type=nf4", "frozen_base=fp8"]]
)
def test_two_bases_are_refused_and_both_are_named(words):
    with pytest.raises(ConfigError) as caught:
        load(words)
    assert all(word.replace("=", ": ") in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "word", ["compute_type=wint8", "compute_type=wint4/8", "compute_type=nf4", "frozen_base=mxfp4"]
)
def test_a_packed_base_needs_adapters(word):
    with pytest.raises(ConfigError, match="adapters leave frozen") as caught:
        load([word, "fine_tuning=Full"])
    assert "fine_tuning: LoRA" in caught.value.fix
    assert load([word, "fine_tuning=Full"], "export").lora.lora is False


def test_how_a_kind_is_multiplied_is_a_key_of_its_own():
    with pytest.raises(ConfigError, match="multiplied in fp8") as caught:
        load(["frozen_base=mxfp4-fp8"])
    assert caught.value.fix == "frozen_base: mxfp4 and frozen_products: fp8"


def test_fp8_training_has_no_other_base():
    with pytest.raises(ConfigError, match="compute_type: fp8 and frozen_base: int4"):
        load(["compute_type=fp8", "frozen_base=int4"])


def test_products_are_bf16_unless_asked_and_that_is_said_where_fp8_would_be_exact():
    assert load(["frozen_base=int4"]).lora.frozen_products == "bf16"
    for base, told in (("int4", 1), ("mxfp4", 1), ("wint4/8", 1), ("nf4", 0), ("bf16", 0)):
        assert len(said(load([f"frozen_base={base}"]), "frozen_products")) == told, base
    assert said(load(["frozen_base=int4", "frozen_products=bf16"]), "frozen_products") == []


def test_the_mix_multiplies_its_int4_weights_in_fp8_and_says_which_are_not():
    cfg = load(["compute_type=wint4/8", "frozen_products=fp8"])
    assert cfg.lora.frozen_products == "fp8"
    assert "int4 weights; int8 stay bf16" in said(cfg, "frozen_products")[0]


@pytest.mark.parametrize("base", ["bf16", "int8", "int4-group", "nf4"])
def test_fp8_products_of_weights_that_fp8_would_round_are_refused(base):
    with pytest.raises(ConfigError, match=f"frozen_base: {base} are not") as caught:
        load([f"frozen_base={base}", "frozen_products=fp8"])
    assert "int4" in caught.value.fix


def test_an_fp8_base_is_multiplied_in_fp8():
    assert load(["frozen_base=fp8"]).lora.frozen_products == "fp8"
    with pytest.raises(ConfigError, match="multiplied in fp8"):
        load(["frozen_base=fp8", "frozen_products=bf16"])


@pytest.mark.parametrize("words", [[], ["stage=DPO"], ["sharding=stage1"], ["tensor_parallel_degree=2"]])
@pytest.mark.parametrize("base", ["fp8", "wint4/8"])
def test_a_packed_base_goes_with_every_stage_and_layout_of_adapters(base, words):
    assert load([f"frozen_base={base}", *words]).lora.frozen_base == base


def test_a_kind_that_multiplies_in_fp8_is_no_grid_of_its_own() -> None:
    with pytest.raises(ConfigError, match="multiplied in fp8") as caught:
        load(["merge_grid=int4-fp8"], "export")
    assert caught.value.fix == "merge_grid: int4"
