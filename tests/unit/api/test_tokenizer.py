"""The tokenizer of `erniekit.load` is called as a Hugging Face tokenizer is, and gives what transformers' gives."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import erniekit
from erniekit.data.template import prompt_ids
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError, DataError

TEXTS = ["The quiet harbor", "copper 1234 河边的灯"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": "河边的灯很亮"},
]


@pytest.fixture(scope="module", params=["llama", "ernie4_5"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Ours and transformers', of one folder."""
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path_factory.mktemp("models") / request.param, family=request.param)
    return erniekit.load(folder).tokenizer, AutoTokenizer.from_pretrained(folder)


def test_texts_have_the_ids_that_transformers_gives_them_padded_and_cut(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    assert ours(TEXTS[0])["input_ids"] == theirs(TEXTS[0], add_special_tokens=True)["input_ids"]
    for keys in (dict(padding=True), dict(padding="max_length", max_length=24), dict(truncation=True, max_length=3)):
        made, expected = ours(TEXTS, return_tensors="np", padding_side="right", **keys), theirs(TEXTS, **keys)
        assert made.input_ids.tolist() == expected["input_ids"]
        assert made["attention_mask"].tolist() == expected["attention_mask"]
    ids = ours(TEXTS[1], return_tensors="pt").to("cpu").input_ids
    assert isinstance(ids, torch.Tensor)
    assert ours.decode(ids[0]) == TEXTS[1]
    assert ours.batch_decode(ours(TEXTS).input_ids) == TEXTS
    assert (ours.eos_token_id, ours.eos_token) == (theirs.eos_token_id, theirs.eos_token)
    assert len(ours.convert_ids_to_tokens(ids[0])) == ids.shape[1]


def test_a_conversation_is_rendered_as_transformers_does_and_its_ids_are_those_of_training(pair) -> None:
    ours, theirs = pair
    if theirs.chat_template:
        for ask in (True, False):
            text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=ask)
            assert ours.apply_chat_template(TALK, tokenize=False, add_generation_prompt=ask) == text
    ids = ours.apply_chat_template(TALK, add_generation_prompt=True)
    assert ids == prompt_ids(TALK, ours)
    both = ours.apply_chat_template([TALK, TALK[1:2]], add_generation_prompt=True, padding=True, return_dict=True)
    assert both["input_ids"][0] == ids
    assert both["attention_mask"][1][0] == 0, "padded on the side where nothing is generated"
    whole = ours.apply_chat_template(TALK, return_tensors="np")
    assert isinstance(whole, np.ndarray)
    assert ours.decode(whole[0], skip_special_tokens=False) == ours.apply_chat_template(TALK, tokenize=False)


def test_a_copy_in_another_process_is_the_same_tokenizer(pair: tuple[Any, Any]) -> None:
    copy = pickle.loads(pickle.dumps(pair[0]))
    assert copy(TEXTS) == pair[0](TEXTS)
    assert copy.fingerprint == pair[0].fingerprint


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda t: t([1]), "text 1 of 1 is int"),
        (lambda t: t(TEXTS, return_tensors="pt"), "padding=True"),
        (lambda t: t(TEXTS, return_tensors="tf", padding=True), "'tf' is not known"),
        (lambda t: t(TEXTS, padding="widest"), "padding='widest'"),
        (lambda t: t("a", truncation=True), "max_length is None"),
        (lambda t: t.apply_chat_template("Hello"), "not a mapping with role"),
    ],
)
def test_a_wrong_call_is_refused_with_the_way_out(pair: tuple[Any, Any], call: Any, why: str) -> None:
    with pytest.raises((ConfigError, DataError)) as raised:
        call(pair[0])
    assert why in str(raised.value)


def test_control_strings_in_a_text_stay_text(base: Path) -> None:
    tokenizer = erniekit.load(base).tokenizer
    assert tokenizer.eos_id not in tokenizer(tokenizer.eos_token).input_ids
