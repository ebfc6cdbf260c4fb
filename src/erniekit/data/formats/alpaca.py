"""The `alpaca` format: `instruction`, `input`, `output`, optional `system` and `history` of (user, assistant) pairs.

Preference rows have `chosen` and `rejected` for `output`. Called through the tables of formats/. `compat` joins
instruction and input without a separator and ignores history.
"""

from __future__ import annotations

from typing import Any

from erniekit.data.formats import pairs
from erniekit.data.formats.erniekit import build
from erniekit.data.formats.fields import BadRow, holds, named, refuse_tools, require, text, unread
from erniekit.data.formats.message import from_cell
from erniekit.data.preference import Preference
from erniekit.data.types import Conversation

_QUESTIONS = ("instruction", "question", "prompt")  # what preference sets call the same field


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `instruction` and `output`, not {named(row)}")
    if not compat:
        refuse_tools(row)
    question = _question(row, "instruction", compat)
    require(row, "output")
    past = [] if compat else _history(row.get("history"))
    questions = [pair[0] for pair in past] + [question]
    answers = [pair[1] for pair in past] + [text(row["output"], "output")]
    known = ("instruction", "input", "output", "system", *(() if compat else ("history",)))
    return [build(row.get("system"), questions, answers, [True] * len(answers), compat, unread(row, known))]


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `chosen` and `rejected`, not {named(row)}")
    if not compat:
        refuse_tools(row)
    field_name = next((field for field in _QUESTIONS if row.get(field) is not None), "instruction")
    question = _question(row, field_name, compat)
    require(row, "chosen", "rejected")
    past = [] if compat else _history(row.get("history"))
    known = (field_name, "input", "system", "chosen", "rejected", *(() if compat else ("history", "score_delta")))
    return Preference(
        pairs.prompt(row.get("system"), [*(pair[0] for pair in past), question], [pair[1] for pair in past], compat),
        pairs.answer(row["chosen"], "chosen"),
        pairs.answer(row["rejected"], "rejected"),
        score_delta=pairs.score_delta(row, compat),
        unused=tuple(unread(row, known)),
    )


def _question(row: dict[str, Any], field_name: str, compat: bool) -> str:
    parts = [text(row[key], key, empty=True) for key in (field_name, "input") if row.get(key) is not None]
    question = ("" if compat else "\n").join(part for part in parts if part)
    if not question.strip():
        require(row, field_name)
        raise BadRow("empty_text", f"`{field_name}` and `input` are empty")
    return question


def _history(value: Any) -> list[tuple[str, str]]:
    if not holds(value):
        return []
    value = from_cell(value, "history")
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"`history` must be a list of [user, assistant] pairs, not {named(value)}")
    out = []
    for i, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow("wrong_type", f"`history[{i}]` must be a pair [user, assistant]")
        out.append((text(pair[0], f"history[{i}][0]"), text(pair[1], f"history[{i}][1]")))
    return out
