"""The events of a stream: the short way for plain text gives the same JSON as the long one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.serve.engines.base import Token
from erniekit.serve.output_parser import Delta
from erniekit.serve.response_builder import ResponseBuilder
from erniekit.serve.running_request import ChoiceDelta
from support.small_tokenizers import make

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def builder(chat: bool, tokenizer: Tokenizer | None = None) -> ResponseBuilder:
    """With a tokenizer also log-probabilities are given."""
    served = SimpleNamespace(tokenizer=tokenizer, name='a "quoted" name')
    prepared = SimpleNamespace(chat=chat, served=served, echo=[])
    request: Any = SimpleNamespace(prepared=prepared, choices=[None, None])
    return ResponseBuilder(request, logprobs=tokenizer is not None)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_plain_text_on_the_short_way_reads_as_on_the_long_one(chat: bool, usage: bool) -> None:
    made = builder(chat)
    for number in (0, 1):
        made.events(ChoiceDelta(number, [Delta("content", "begins")], []), usage)
        for text in ("x", 'a "b" \\ \n\t\x00 é 😀 \u2028', ""):
            part = ChoiceDelta(number, [Delta("content", text)], [])
            event = made.events(part, usage)
            assert event.startswith(b"data: ")
            assert event.endswith(b"\n\n")
            assert event.count(b"\n") == 2, "a line break inside would end the event"
            (chunk,) = made.chunks(part)
            assert json.loads(event[6:]) == ({**chunk, "usage": None} if usage else chunk)


def test_half_a_character_becomes_a_question_mark() -> None:
    made = builder(chat=True)
    made.events(ChoiceDelta(0, [Delta("content", "begins")], []), False)
    event = made.events(ChoiceDelta(0, [Delta("content", "\ud83d")], []), False)
    assert json.loads(event[6:])["choices"][0]["delta"]["content"] == "?"


@pytest.mark.parametrize("kind", ["ernie", "byte level"])
def test_the_bytes_of_log_probabilities_add_up_to_the_text(kind: str, paddle: Path, tmp_path: Path) -> None:
    """A character of several tokens is in none of their texts."""
    tokenizer = make(kind, paddle, tmp_path / "tokenizer")
    if (file := tokenizer.folder / "tokenizer.json").is_file():  # which decodes as those of released models do
        file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": BYTE_LEVEL}))
        tokenizer = load_tokenizer(tokenizer.folder)
    text = "the river 😀 two"
    ids = tokenizer.encode_text(text)
    tokens = [Token(id, -0.5, ((id, -0.5), (tokenizer.eos_id, -2.0))) for id in ids]
    part = ChoiceDelta(0, [Delta("content", text)], tokens)
    (chunk,) = builder(True, tokenizer).chunks(part)
    told = chunk["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in told) == text.encode()
    assert "\ufffd" in [one["token"] for one in told], "the character is one token"
    for one in told:
        assert one["token"] == bytes(one["bytes"]).decode("utf-8", "replace")
        assert one["top_logprobs"][0] == {name: one[name] for name in ("token", "logprob", "bytes")}
    assert bytes(told[0]["top_logprobs"][1]["bytes"]).decode() == "</s>", "a control token has its name"
    (chunk,) = builder(False, tokenizer).chunks(part)
    assert chunk["choices"][0]["logprobs"]["tokens"] == [one["token"] for one in told]
