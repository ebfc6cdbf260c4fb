"""Thoughts and tool calls that stand on a row beside its answers, put into the messages these answers become.

Called by the formats whose answers are texts, and by those of messages for rows that hold a thought beside the list.
A single value is that of one answer; a list has an entry per answer, empty ones where an answer has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from erniekit.data.formats.fields import BadRow, holds, named, text
from erniekit.data.formats.message import MessageReader, bare_thought, from_cell, one_thought
from erniekit.data.thinking import FIELDS
from erniekit.data.types import ChatMessage
from erniekit.printable import counted

CALLS = "tool_calls"
BESIDE = (*FIELDS, CALLS)  # fields of a row


def beside(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields among BESIDE that hold something."""
    return {name: row[name] for name in BESIDE if holds(row.get(name))}


def answer_text(value: Any, field: str, given: Mapping[str, Any]) -> str:
    """given: what stands beside it; with tool calls it may be empty or null, as `content` of a message may."""
    calls = CALLS in given
    return "" if value is None and calls else text(value, field, empty=calls)


def answer_texts(value: Any, field: str, given: Mapping[str, Any]) -> list[str]:
    """One text stands for a list of one."""
    if value is None or isinstance(value, str):
        return [answer_text(value, field, given)]
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"`{field}` must be text or a list of texts, not {named(value)}")
    if not value:
        raise BadRow("empty_text", f"`{field}` is an empty list")
    return [answer_text(item, f"{field}[{i}]", given) for i, item in enumerate(value)]


def attached(
    said: Sequence[ChatMessage], given: Mapping[str, Any], field: str, reader: MessageReader, last: bool = False
) -> list[ChatMessage]:
    """given: what `beside` found. field: the one whose answers these are. last: a single value is that of the last
    answer; otherwise it needs the answer to be the only one."""
    if not given:
        return list(said)
    places = [i for i, message in enumerate(said) if message.role == "assistant"]
    out = list(said)
    for name, value in given.items():
        for place, one in zip(places, _per_answer(value, name, len(places), field, last)):
            if holds(one):
                out[place] = _with(out[place], name, one, reader)
    for place in places:
        if not out[place].content.strip() and not out[place].tool_calls:
            raise BadRow("empty_text", f"`{field}` holds an empty answer, with no tool call beside it")
    return out


def _per_answer(value: Any, name: str, count: int, field: str, last: bool) -> list[Any]:
    if name == CALLS:
        value = from_cell(value, name)
        value = [value] if isinstance(value, dict) else value
    if isinstance(value, list) and (name != CALLS or all(item is None or isinstance(item, list) for item in value)):
        if len(value) != count:
            has = counted(len(value), "entry", "entries")
            raise BadRow("length_mismatch", f"`{name}` has {has} for the {counted(count, 'answer')} of `{field}`")
        return value
    if count != 1 and not last:
        of = "a list of calls" if name == CALLS else "a text or null"
        raise BadRow(
            "length_mismatch",
            f"`{name}` is one for the {count} answers of `{field}`: write a list with an entry for each, {of}",
        )
    return [None] * (count - 1) + [value]


def _with(message: ChatMessage, name: str, value: Any, reader: MessageReader) -> ChatMessage:
    if name == CALLS:
        if message.tool_calls:
            raise BadRow("tools", f"`{name}` stands on the row and in its last message")
        return replace(message, tool_calls=reader.calls(value, name))
    thought = bare_thought(text(value, name, empty=True), name)
    if message.thought and thought and message.thought != thought:
        raise BadRow("two_thoughts", f"`{name}` of the row is another thought than that of its answer")
    content, thought = one_thought(message.content, message.thought or thought, name)
    return replace(message, content=content, thought=thought)
