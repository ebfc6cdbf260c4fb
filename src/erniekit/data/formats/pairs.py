"""What every format of preference rows reads alike: an answer of one or several turns, and how much better it is.

Called by the `preference` readers of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from erniekit.data.formats.answers import CALLS, answer_texts, attached, beside
from erniekit.data.formats.fields import BadRow, holds, named, text
from erniekit.data.formats.message import MessageReader, from_cell
from erniekit.data.types import ChatMessage

SIDES = ("chosen", "rejected")


def beside_both(row: Mapping[str, Any], compat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of thoughts and tool calls on the row, those of its chosen answer and those of its rejected one; with `response`,
    of its first and its second."""
    both: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in {} if compat else beside(row).items():
        value = from_cell(value, name) if name == CALLS else value
        if isinstance(value, dict) and set(value) <= set(SIDES):
            value = [value.get(side) for side in SIDES]
        known = isinstance(value, list) and len(value) == 2
        if not known or (name == CALLS and not all(item is None or isinstance(item, list) for item in value)):
            raise BadRow(
                "wrong_type",
                f"`{name}` beside two answers must be a list of two, or an object of `chosen` and `rejected`",
            )
        for side, one in zip(both, value):
            if holds(one):
                side[name] = one
    return both


def answer(
    value: Any, field: str, given: Mapping[str, Any] | None = None, reader: MessageReader | None = None
) -> tuple[ChatMessage, ...]:
    """A text, or texts of assistant, user, assistant in turn. given: what stands beside it, of `beside_both`."""
    given, reader = given or {}, reader or MessageReader(False, preference=True)
    if value is None and CALLS not in given:
        raise BadRow("missing_field", f"`{field}` is null; it must be the answer")
    said = answer_texts(value, field, given)
    if len(said) % 2 == 0:
        raise BadRow(
            "length_mismatch",
            f"`{field}` has {len(said)} texts; they are assistant, user, assistant in turn and end with the assistant",
        )
    contents = [ChatMessage("user" if i % 2 else "assistant", words) for i, words in enumerate(said)]
    return tuple(attached(contents, given, field, reader))


def prompt(system: Any, questions: list[str], answers: list[str], compat: bool) -> tuple[ChatMessage, ...]:
    """Earlier turns and the last question. An empty system text is none (the old reader kept its newline)."""
    said = []
    if system is not None:
        system = text(system, "system", empty=True)
        if system or compat:
            said.append(ChatMessage("system", system))
    for i, question in enumerate(questions):
        said.append(ChatMessage("user", question))
        if i < len(answers):
            said.append(ChatMessage("assistant", answers[i]))
    return tuple(said)


def number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRow("wrong_type", f"`{field}` must be a number, not {named(value)}")
    return float(value)


def score_delta(row: Mapping[str, Any], compat: bool) -> float:
    """How much better the chosen answer is, if the row says so; the old reader never looked."""
    if compat or row.get("score_delta") is None:
        return 1.0
    delta = number(row["score_delta"], "score_delta")
    if delta <= 0:
        raise BadRow("bad_score", f"`score_delta` is {delta:g}; the chosen answer must be the better one")
    return delta
