"""The `prompt_completion` format: a question and its answer in two fields, as texts or as lists of messages.

The question is called `prompt`, `question`, `query` or `instruction`, the answer `completion`, `response`, `answer` or
`output`. Preference rows have `chosen` and `rejected`, with the prompt in its own field or as what both begin with.
Called through the tables of formats/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from erniekit.data.formats import alpaca, messages, pairs
from erniekit.data.formats.fields import BadRow, flag, holds, named, refuse_tools, require, text, unread
from erniekit.data.formats.message import MessageReader
from erniekit.data.preference import Preference
from erniekit.data.thinking import FIELDS
from erniekit.data.types import ChatMessage, Conversation

PROMPTS = ("prompt", "question", "query", "instruction")
ANSWERS = ("completion", "response", "answer", "output")
_MORE = ("input", "context")  # text that the question is about
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")


def prompt_and_completion(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the two fields in this row."""
    found = [next((name for name in names if row.get(name) is not None), "") for names in (PROMPTS, ANSWERS)]
    return (found[0], found[1]) if all(found) else None


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `prompt` and `completion`, not {named(row)}")
    names = prompt_and_completion(row)
    if names is None:
        require(row, next((name for name in PROMPTS if name in row), "prompt"))
        require(row, next((name for name in ANSWERS if name in row), "completion"))
        raise AssertionError("one of them is missing")
    prompt, completion = (messages.listed(row[name], name) for name in names)
    if isinstance(prompt, list) or isinstance(completion, (list, dict)):
        return _of_messages(row, names, prompt, completion, compat)
    return [_of_texts(row, *names)]


def _of_texts(row: Mapping[str, Any], prompt: str, completion: str) -> Conversation:
    refuse_tools(row)
    parts = [text(row[name], name, empty=True) for name in (prompt, *_MORE) if row.get(name) is not None]
    question = "\n".join(part for part in parts if part)
    if not question.strip():
        raise BadRow("empty_text", f"`{prompt}` is empty")
    reader = MessageReader(False)
    thoughts = {name: row[name] for name in FIELDS if row.get(name) is not None}
    answer = reader.read({"role": "assistant", "content": text(row[completion], completion), **thoughts}, completion)
    trained = row.get("label") is None or flag(row["label"], "label")
    opened = reader.opening([ChatMessage("user", question), replace(answer, trained=trained)], row)
    known = (prompt, completion, *_MORE, *FIELDS, "system", "label", "tools")
    return Conversation(tuple(opened), unused=(*unread(row, known), *reader.unused))


def _of_messages(
    row: Mapping[str, Any], names: Sequence[str], given_prompt: Any, given_completion: Any, compat: bool
) -> list[Conversation]:
    """The prompt's assistant messages are read, the completion's are trained."""
    reader = MessageReader(compat)
    given = given_prompt if isinstance(given_prompt, list) else [messages.user_message(given_prompt)]
    answer = given_completion if isinstance(given_completion, list) else [given_completion]
    if not isinstance(given_completion, (list, dict)):
        answer = [{"role": "assistant", "content": given_completion}]
    prompt = [replace(message, trained=False) for message in reader.read_all(given, names[0])]
    completion = reader.read_all(answer, names[1])
    places = [f"{names[0]}[{i}]" for i in range(len(prompt))] + [f"{names[1]}[{i}]" for i in range(len(completion))]
    messages.check_order([*prompt, *completion], places, names[1])
    if row.get("label") is not None:
        trained = flag(row["label"], "label")
        completion = [replace(message, trained=message.trained and trained) for message in completion]
    opened = tuple(reader.opening([*prompt, *completion], row))
    unused = (*unread(row, (*names, "tools", "label", *reader.row_fields)), *reader.unused)
    tools = messages.read_tools(row)
    if tools or any(message.role == "tool" or message.tool_calls for message in opened):
        return messages.one_per_answer(opened, tools, unused)
    return [Conversation(opened, unused=unused)]


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `chosen` and `rejected`, not {named(row)}")
    require(row, "chosen", "rejected")
    chosen, rejected = (messages.listed(row[name], name) for name in ("chosen", "rejected"))
    if any(isinstance(value, (list, dict)) for value in (chosen, rejected, messages.listed(row.get("prompt"), ""))):
        return messages.preference(row, compat)
    if any(holds(row.get(name)) for name in PROMPTS):
        return alpaca.preference(row, compat)
    refuse_tools(row)
    prompt, better, worse = divided_at_difference(text(chosen, "chosen"), text(rejected, "rejected"))
    known = ("chosen", "rejected", "score_delta", "system")
    opened = MessageReader(compat, preference=True).opening(prompt, row)
    return Preference(
        tuple(opened), tuple(better), tuple(worse),
        score_delta=pairs.score_delta(row, compat), unused=tuple(unread(row, known)),
    )  # fmt: skip


def divided_at_difference(chosen: str, rejected: str) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
    """Two texts that begin with the same prompt: transcripts of Human and Assistant by their turns, other texts where
    they first differ, as TRL divides them."""
    turns = [_transcript(value) for value in (chosen, rejected)]
    if all(turns):
        for field, answer in zip(("chosen", "rejected"), turns):
            messages.check_order(answer, [f"{field} turn {i + 1}" for i in range(len(answer))], field)
        return messages.common(*turns)
    same = next((i for i, (one, other) in enumerate(zip(chosen, rejected)) if one != other), None)
    if same is None:
        raise BadRow("no_question", "`chosen` and `rejected` are equal, or one begins with the other: no `prompt`")
    same -= same > 0 and chosen[same - 1] == " "
    if not chosen[:same].strip():
        raise BadRow("no_question", "the row has no `prompt`, and `chosen` and `rejected` begin differently")
    return (
        [ChatMessage("user", chosen[:same])],
        [ChatMessage("assistant", chosen[same:])],
        [ChatMessage("assistant", rejected[same:])],
    )


def _transcript(value: str) -> list[ChatMessage]:
    """Turns of `Human: ... Assistant: ...`; none where the text is not such a transcript."""
    pieces = _TURN.split(value.lstrip("\n") if value.lstrip("\n").startswith("Human:") else "")
    return [ChatMessage(_SPEAKERS[who], content.strip()) for who, content in zip(pieces[1::2], pieces[2::2])]
