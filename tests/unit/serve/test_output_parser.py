"""Thoughts, words and calls are told apart however the text is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest

from erniekit.serve.output_parser import OutputParser, parse_tool_call

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CASES = {
    # text, the prompt opened the thought, tools -> thought, words, calls
    "plain": ("Hello <b>.", False, False, "", "Hello <b>.", []),
    "blanks in front stay": ("  x", False, False, "", "  x", []),
    "a thought": ("<think>\nhm\n</think>\n\nhello", False, False, "hm", "hello", []),
    "an opened thought": ("hm\n</think>\n\n<response>\nhello\n</response>\n", True, False, "hm", "hello", []),
    "an unended thought": ("<think>hm and", False, False, "hm and", "", []),
    "a tag in mid-answer is a word": ("see <think> and </think>", False, False, "", "see <think> and </think>", []),
    "a response tag in mid-answer is one too": ("see <response>", False, False, "", "see <response>", []),
    "an answer in a response": ("<response>\nhello\n</response>\n", False, False, "", "hello", []),
    "blanks and a response": (" \n<response>\n hello", False, False, "", "hello", []),
    "nearly a response": ("<respond to", False, False, "", "<respond to", []),
    "a call in a response": ("<response>" + CALL + "</response>", False, True, "", "", [("f", {"a": 1})]),
    "a call behind a response": ("<response>ok</response>\n" + CALL, False, True, "", "ok", [("f", {"a": 1})]),
    "a call behind a tag in words": ("a <response> b" + CALL, False, True, "", "a <response> b", [("f", {"a": 1})]),
    "a call behind an end in words": ("ok</response>" + CALL, False, True, "", "ok</response>", [("f", {"a": 1})]),
    "nearly a tag": ("<thin air", False, False, "", "<thin air", []),
    "a call": ("ok\n" + CALL, False, True, "", "ok", [("f", {"a": 1})]),
    "two calls": (CALL + "\n" + CALL, False, True, "", "", [("f", {"a": 1})] * 2),
    "a thought and a call": ("<think>hm</think>" + CALL, False, True, "hm", "", [("f", {"a": 1})]),
    "no call": ("<tool_call>oops</tool_call>", False, True, "", "<tool_call>oops</tool_call>", []),
    "a call cut short": ('<tool_call>{"name": "f', False, True, "", '<tool_call>{"name": "f', []),
    "a further call cut short": (CALL + '\n<tool_call>\n{"n', False, True, "", "", [("f", {"a": 1})]),
    "a further call cut in its tag": (CALL + "\n<tool_c", False, True, "", "", [("f", {"a": 1})]),
    "words behind a call": (CALL + "\nas a <", False, True, "", "as a <", [("f", {"a": 1})]),
    "a sign behind a call": (CALL + "\n<\n", False, True, "", "<\n", [("f", {"a": 1})]),
    "calls nobody asked for are text": (CALL, False, False, "", CALL, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_divided_alike_in_any_pieces(name):
    text, opened, tools, thought, words, calls = CASES[name]
    for seed in range(8):
        luck = random.Random(seed)
        speech, deltas, at = OutputParser(opened, tools), [], 0
        while at < len(text):
            step = luck.randrange(1, 7) if seed else len(text)
            deltas += speech.add(text[at : at + step])
            at += step
        deltas += speech.add("", last=True)
        assert "".join(d.text for d in deltas if d.kind == "reasoning") == thought
        assert "".join(d.text for d in deltas if d.kind == "content") == words
        found = [d.call for d in deltas if d.call]
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls
        assert [c["index"] for c in found] == list(range(len(calls)))


def test_an_answer_that_comes_with_its_end_is_divided_as_one_in_single_characters():
    luck = random.Random(0)
    pieces = ("<think>", "</think>", "<response>", "</response>", CALL, "<tool_call>", "a", " ", "\n", "<")
    for _ in range(2000):
        text = "".join(luck.choices(pieces, k=luck.randint(1, 6)))
        whole, single = OutputParser(tools=True), OutputParser(tools=True)
        at_once = whole.add(text, last=True)
        one_by_one = [delta for sign in text for delta in single.add(sign)] + single.add("", last=True)
        assert _told(at_once) == _told(one_by_one), text
        assert (whole.called, whole.cut) == (single.called, single.cut), text


def _told(deltas):
    shown = ["".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")]
    return shown, [d.call["function"] for d in deltas if d.call]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": 3}', "[" * 100000, '{"arguments": {}}'])
def test_what_is_no_call_is_none(text):
    assert parse_tool_call(text) is None


def test_arguments_come_as_text_whatever_form_the_model_gave_them():
    assert parse_tool_call('{"name": "f", "arguments": "{}"}')["function"]["arguments"] == "{}"
    assert parse_tool_call('{"name": "f", "parameters": {"城": "北京"}}')["function"]["arguments"] == '{"城": "北京"}'
    assert parse_tool_call('{"name": "f"}')["function"]["arguments"] == "{}"
