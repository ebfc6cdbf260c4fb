"""The bytes of tokens add up to the text, for each kind of tokenizer folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.data.token_bytes import byte_letters
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from support.small_tokenizers import byte_fallback, byte_level, make

TEXTS = ["the quiet river", '{"a": [1, -2.5e3]}', "山 and 你好 😀", "  two  blanks\n\tand a tab", "é\u0301 \x7f"]
LLAMA = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}  # fmt: skip
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def folder_with(folder: Path, decoder: dict) -> Tokenizer:
    """A small tokenizer.json that decodes as those of released models do."""
    byte_level(folder) if decoder is BYTES else byte_fallback(folder, "first")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": decoder}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["ernie", "added words"])
def test_of_a_sentencepiece_model_they_add_up_to_the_text(kind: str, text: str, paddle: Path, tmp_path: Path) -> None:
    check(make(kind, paddle, tmp_path / "t"), text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("decoder", [BYTES, LLAMA], ids=["byte level", "byte fallback"])
def test_of_a_tokenizer_json_they_add_up_to_the_text(decoder: dict, text: str, tmp_path: Path) -> None:
    check(folder_with(tmp_path, decoder), text)


def check(tokenizer: Tokenizer, text: str) -> None:
    spelled = tokenizer.token_bytes()
    assert spelled is not None
    ids = tokenizer.encode_text(text)
    whole = b"".join(spelled[id] for id in ids)
    assert whole in (text.encode(), b" " + text.encode()), "a prefix blank at most"
    assert spelled[tokenizer.eos_id] == b""


def test_a_decoder_that_joins_words_has_no_table(tmp_path: Path) -> None:
    wordpiece = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    assert folder_with(tmp_path, wordpiece).token_bytes() is None


def test_the_letters_of_bytes_are_those_of_the_tokenizers_library() -> None:
    from tokenizers import pre_tokenizers

    letters = byte_letters()
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(letters.values()) == list(range(256))
