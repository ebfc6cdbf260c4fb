"""Streaming output parser: divides generated text into reasoning, content and tool calls.

Used by running_request.py and chat_client.py. The tags are those of ERNIE's thinking models and tool templates:
<think>, <response>, <tool_call>.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from erniekit.serve.detokenizer import partial_match

THINK, THINK_END = "<think>", "</think>"
RESPONSE = ("<response>", "</response>")
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Delta:
    kind: str  # reasoning | content | tool
    text: str = ""
    call: dict[str, Any] | None = None


class OutputParser:
    """reasoning_open: the prompt already opened the thought. tools: whether calls are read, or left as text.
    one_call: what follows the first call is dropped.

    Of an answer that ends inside a further call nothing of that call is shown.
    A thought counts only at the start of an answer: later the tag is plain text.
    """

    def __init__(self, reasoning_open: bool = False, tools: bool = False, one_call: bool = False) -> None:
        self.tools, self.one_call = tools, one_call
        self.called = 0
        self.cut = False  # the answer ended inside a call after others, or inside the tag that opens one
        self._state = "thought" if reasoning_open else "start"
        self._held = ""
        self._blank = True  # blanks between the parts belong to neither
        self._response = False

    def add(self, text: str, last: bool = False) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        moved = True
        while moved:
            before = self._state, len(self._held)
            out += getattr(self, f"_{self._state}")(last)
            moved = (self._state, len(self._held)) != before
        return [d for d in out if d.text or d.call]

    def _start(self, last: bool) -> Iterator[Delta]:
        seen = self._held.lstrip()
        if seen.startswith(THINK):
            self._held, self._state = seen[len(THINK) :], "thought"
        elif seen.startswith(RESPONSE[0]):
            self._state = "answer"
        elif last or not any(tag.startswith(seen) for tag in (THINK, RESPONSE[0])):
            self._state, self._blank = "answer", False  # without a thought it keeps the blanks it begins with
        yield from ()

    def _thought(self, last: bool) -> Iterator[Delta]:
        at = self._held.find(THINK_END)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(THINK_END) :]
            self._state, lead = "answer", self._blank
            self._blank = True
            yield Delta("reasoning", text.lstrip() if lead else text)
            return
        cut = len(self._held) if last else _unambiguous(self._held, (THINK_END,), blanks=True)
        text, self._held = self._held[:cut], self._held[cut:]
        if self._blank:
            text = text.lstrip()
        self._blank = self._blank and not text
        yield Delta("reasoning", text)

    def _answer(self, last: bool) -> Iterator[Delta]:
        tags = (*RESPONSE, TOOL_CALL) if self.tools else RESPONSE
        at, tag = min(((n, t) for t in tags if (n := self._held.find(t)) >= 0 and self._counts(t, n)), default=(-1, ""))
        if tag == TOOL_CALL:
            before, self._held, self._state = self._held[:at], self._held[at + len(TOOL_CALL) :], "call"
            yield Delta("content", self._shown(before.rstrip()))
            return
        if tag:
            opens = tag == RESPONSE[0]
            before, self._held = self._held[:at], self._held[at + len(tag) :]
            self._response = opens
            text = self._shown(before if opens else before.rstrip())
            self._blank = True
            yield Delta("content", text)
            return
        if last and self.called and self._blank and (begun := self._held.lstrip()) and TOOL_CALL.startswith(begun):
            self._held, self.cut = "", True
            return
        cut = len(self._held) if last else _unambiguous(self._held, tags, self._response or self.tools)
        text, self._held = self._held[:cut], self._held[cut:]
        yield Delta("content", self._shown(text))

    def _counts(self, tag: str, at: int) -> bool:
        """Whether the tag at this place of the held text is one. A response's tag among other words is a word."""
        return tag == TOOL_CALL or self._response or (self._blank and not self._held[:at].strip())

    def _call(self, last: bool) -> Iterator[Delta]:
        at = self._held.find(TOOL_CALL_END)
        if at < 0 and not last:
            return
        inside, self._held = (self._held, "") if at < 0 else (self._held[:at], self._held[at + len(TOOL_CALL_END) :])
        self._state, self._blank = "answer", True
        call = parse_tool_call(inside)
        if call is None and at < 0 and self.called:
            self.cut = True
            return
        if call is None:
            yield Delta("content", TOOL_CALL + inside + (TOOL_CALL_END if at >= 0 else ""))
            return
        yield Delta("tool", call={"index": self.called, **call})
        self.called += 1
        if self.one_call:
            self._state = "called"

    def _called(self, last: bool) -> Iterator[Delta]:
        self._held = ""
        yield from ()

    def _shown(self, text: str) -> str:
        if self._blank:
            text = text.lstrip()
        self._blank = self._blank and not text
        return text


def _unambiguous(text: str, tags: tuple[str, ...], blanks: bool) -> int:
    """How much of it can be shown: not what may become a tag, nor (if they go with one) the blanks in front of it."""
    cut = len(text) - partial_match(text, tags)
    return len(text[:cut].rstrip()) if blanks else cut


def parse_tool_call(text: str) -> dict[str, Any] | None:
    """OpenAI's form of what stood between the tags; None when it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    given = call.get("arguments", call.get("parameters", {}))
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
