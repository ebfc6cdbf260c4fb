"""The events of a stream: the short way for plain text gives the same JSON as the long one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from erniekit.serve.output_parser import Delta
from erniekit.serve.response_builder import ResponseBuilder
from erniekit.serve.running_request import ChoiceDelta


def builder(chat: bool) -> ResponseBuilder:
    served = SimpleNamespace(tokenizer=None, name='a "quoted" name')
    prepared = SimpleNamespace(chat=chat, served=served, echo=[])
    return ResponseBuilder(SimpleNamespace(prepared=prepared, choices=[None, None]), logprobs=False)  # type: ignore[arg-type]


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
