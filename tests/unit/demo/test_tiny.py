"""The tiny model: real enough for every room, the same bytes every time."""

from __future__ import annotations

import pytest
import torch

import erniekit
from erniekit.data.tokenizer import load_tokenizer
from erniekit.demo.tiny import SHAPE, demo_text, make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_the_same_arguments_give_the_same_bytes(tiny, tmp_path):
    again = make_tiny_model(tmp_path)
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}


def test_another_seed_gives_other_weights(tiny, tmp_path):
    other = make_tiny_model(tmp_path, seed=1)
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()
    assert (other / "tokenizer.model").read_bytes() == (tiny / "tokenizer.model").read_bytes()


@pytest.mark.parametrize(("family", "layout"), [("ernie4_5", "hf"), ("ernie4_5", "paddle"), ("llama", "hf")])
def test_every_family_and_layout_loads_and_answers(tmp_path, family, layout):
    model, tokenizer = erniekit.load(make_tiny_model(tmp_path, family=family, layout=layout))
    ids = torch.tensor([tokenizer.encode_text("What is the capital of Kenya?")])
    assert model(ids).shape == (1, ids.shape[1], SHAPE["vocab_size"])
    assert model.config.family == family


def test_the_layouts_hold_the_same_weights(tiny, tmp_path):
    ours, _ = erniekit.load(tiny)
    paddle, _ = erniekit.load(make_tiny_model(tmp_path, layout="paddle"))
    for name, value in ours.state_dict().items():
        assert torch.equal(value, paddle.state_dict()[name]), name


def test_the_tokenizer_is_of_ernies_kind(tiny):
    tokenizer = load_tokenizer(tiny)
    assert tokenizer.vocab_size == SHAPE["vocab_size"]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert (tokenizer.begin_id, tokenizer.end_id) == (3, 4)
    assert tokenizer.pieces(tokenizer.encode_text("1024")) == ["1", "0", "2", "4"]
    assert tokenizer.begin_id not in tokenizer.encode_text("<|begin_of_sentence|>")


def test_any_text_survives_the_tokenizer(tiny):
    tokenizer = load_tokenizer(tiny)
    for text in [*demo_text(), "  two  blanks\n\nand ü, 龘, 🚀 "]:  # the last ones only as bytes
        assert tokenizer.decode(tokenizer.encode_text(text)) == text
