"""What every format of preference rows shares: an answer of one or several turns, and how much better it is.

Called by the `preference` readers of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from erniekit.data.formats.fields import BadRow, named, text, texts
from erniekit.data.types import ChatMessage


def answer(value: Any, field: str) -> tuple[ChatMessage, ...]:
    """A text, or texts of assistant, user, assistant in turn."""
    if value is None:
        raise BadRow("missing_field", f"`{field}` is null; it must be the answer")
    parts = texts(value, field)
    if len(parts) % 2 == 0:
        raise BadRow(
            "length_mismatch",
            f"`{field}` has {len(parts)} texts; they are assistant, user, assistant in turn and end with the assistant",
        )
    return tuple(ChatMessage("user" if i % 2 else "assistant", content) for i, content in enumerate(parts))


def prompt(system: Any, questions: list[str], answers: list[str], compat: bool) -> tuple[ChatMessage, ...]:
    """Earlier turns and the last question. An empty system text is none (the old reader kept its newline)."""
    parts = []
    if system is not None:
        system = text(system, "system", empty=True)
        if system or compat:
            parts.append(ChatMessage("system", system))
    for i, question in enumerate(questions):
        parts.append(ChatMessage("user", question))
        if i < len(answers):
            parts.append(ChatMessage("assistant", answers[i]))
    return tuple(parts)


def number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRow("wrong_type", f"`{field}` must be a number, not {named(value)}")
    return float(value)


def score_delta(row: Mapping[str, Any], compat: bool) -> float:
    """How much better the chosen answer is, if the row has it; the old reader never looked."""
    if compat or row.get("score_delta") is None:
        return 1.0
    delta = number(row["score_delta"], "score_delta")
    if delta <= 0:
        raise BadRow("bad_score", f"`score_delta` is {delta:g}; the chosen answer must be the better one")
    return delta
