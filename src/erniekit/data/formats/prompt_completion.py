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
from erniekit.data.formats.answers import BESIDE, CALLS, answer_text, attached, beside
from erniekit.data.formats.fields import BadRow, flag, holds, refuse_tools, require, row_named, text, unread
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
    asked = next((name for name in PROMPTS if row.get(name) is not None), "")
    answered = next((name for name in ANSWERS if row.get(name) is not None), "")
    if not answered and holds(row.get(CALLS)):  # an answer that is nothing but a call
        answered = next((name for name in ANSWERS if name in row), "")
    return (asked, answered) if asked and answered else None


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `prompt` and `completion`, not {row_named(row)}")
    names = prompt_and_completion(row)
    if names is None:
        require(row, next((name for name in PROMPTS if name in row), "prompt"))
        require(row, next((name for name in ANSWERS if name in row), "completion"))
        raise AssertionError("one of them is missing")
    asked, answered = (messages.listed(row[name], name) for name in names)
    if isinstance(asked, list) or isinstance(answered, (list, dict)):
        return _of_messages(row, names, asked, answered, compat)
    return _of_texts(row, *names, compat)


def _of_texts(row: Mapping[str, Any], asked: str, answered: str, compat: bool) -> list[Conversation]:
    if compat:
        refuse_tools(row)
    parts = [text(row[name], name, empty=True) for name in (asked, *_MORE) if row.get(name) is not None]
    question = "\n".join(part for part in parts if part)
    if not question.strip():
        raise BadRow("empty_text", f"`{asked}` is empty")
    reader, given = MessageReader(False), beside(row)
    trained = row.get("label") is None or flag(row["label"], "label")
    answer = ChatMessage("assistant", answer_text(row[answered], answered, given), trained)
    said = [ChatMessage("user", question), *attached([answer], given, answered, reader)]
    known = (asked, answered, *_MORE, *(FIELDS if compat else BESIDE), "system", "label", "tools")
    unused = (*unread(row, known), *reader.unused)
    return messages.examples(reader.opening(said, row), () if compat else messages.read_tools(row), unused)


def _of_messages(
    row: Mapping[str, Any], names: Sequence[str], asked: Any, answered: Any, compat: bool
) -> list[Conversation]:
    """What the prompt's assistant says is read, the completion's is learnt."""
    reader = MessageReader(compat)
    opening = asked if isinstance(asked, list) else [messages.user_says(asked)]
    prompt = [replace(message, trained=False) for message in reader.read_all(opening, names[0])]
    given = {} if compat else beside(row)
    if isinstance(answered, (list, dict)):
        completion = reader.read_all(answered if isinstance(answered, list) else [answered], names[1])
    else:
        completion = [ChatMessage("assistant", answer_text(answered, names[1], given))]
    completion = attached(completion, given, names[1], reader, last=True)
    places = [f"{names[0]}[{i}]" for i in range(len(prompt))] + [f"{names[1]}[{i}]" for i in range(len(completion))]
    messages.check_order([*prompt, *completion], places, names[1])
    if row.get("label") is not None:
        trained = flag(row["label"], "label")
        completion = [replace(message, trained=message.trained and trained) for message in completion]
    opened = tuple(reader.opening([*prompt, *completion], row))
    known = (*names, "tools", "label", *reader.row_fields, *(() if compat else BESIDE))
    unused = (*unread(row, known), *reader.unused)
    return messages.examples(opened, messages.read_tools(row), unused)


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `chosen` and `rejected`, not {row_named(row)}")
    require(row, "chosen", "rejected")
    chosen, rejected = (messages.listed(row[name], name) for name in ("chosen", "rejected"))
    if any(isinstance(value, (list, dict)) for value in (chosen, rejected, messages.listed(row.get("prompt"), ""))):
        return messages.preference(row, compat)
    if any(holds(row.get(name)) for name in PROMPTS):
        return alpaca.preference(row, compat)
    if compat:
        refuse_tools(row)
    reader = MessageReader(compat, preference=True)
    prompt, *answers = divided_at_difference(text(chosen, "chosen"), text(rejected, "rejected"))
    given = pairs.beside_both(row, compat)
    better, worse = (
        attached(said, one, side, reader, last=True) for said, one, side in zip(answers, given, pairs.SIDES)
    )
    known = ("chosen", "rejected", "score_delta", "system", *(() if compat else (*BESIDE, "tools")))
    return Preference(
        tuple(reader.opening(prompt, row)), tuple(better), tuple(worse), () if compat else messages.read_tools(row),
        pairs.score_delta(row, compat), (*unread(row, known), *reader.unused),
    )  # fmt: skip


def divided_at_difference(chosen: str, rejected: str) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
    """Two texts that begin with the same prompt: transcripts of Human and Assistant by their turns, other texts where
    they first differ, as TRL divides them."""
    turns = [_transcript(value) for value in (chosen, rejected)]
    if all(turns):
        for field, said in zip(("chosen", "rejected"), turns):
            messages.check_order(said, [f"{field} turn {i + 1}" for i in range(len(said))], field)
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
    return [ChatMessage(_SPEAKERS[who], said.strip()) for who, said in zip(pieces[1::2], pieces[2::2])]
