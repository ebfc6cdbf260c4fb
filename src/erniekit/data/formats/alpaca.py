"""The `alpaca` format: `instruction`, `input`, `output`, optional `system` and `history` of (user, assistant) pairs.

Preference rows have `chosen` and `rejected` for `output`. Called through the tables of formats/. `compat` joins
instruction and input without a separator and ignores history.
"""

from __future__ import annotations

from typing import Any

from erniekit.data.formats import pairs
from erniekit.data.formats.answers import BESIDE, CALLS, answer_text, attached, beside
from erniekit.data.formats.erniekit import turns
from erniekit.data.formats.fields import BadRow, holds, named, require, row_named, text, unread
from erniekit.data.formats.message import MessageReader, from_cell
from erniekit.data.formats.messages import examples, read_tools
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation

_ASKED = ("instruction", "question", "prompt")  # what preference sets call the same field


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `instruction` and `output`, not {row_named(row)}")
    question = _question(row, "instruction", compat)
    given, reader = {} if compat else beside(row), MessageReader(compat)
    if CALLS not in given:
        require(row, "output")
    past = [] if compat else _history(row.get("history"))
    questions = [pair[0] for pair in past] + [question]
    answers = [pair[1] for pair in past] + [answer_text(row.get("output"), "output", given)]
    said = attached([ChatMessage("assistant", words) for words in answers], given, "output", reader, last=True)
    known = ("instruction", "input", "output", "system", *(() if compat else ("history", "tools", *BESIDE)))
    unused = (*unread(row, known), *reader.unused)
    return examples(turns(row.get("system"), questions, said, compat), () if compat else read_tools(row), unused)


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `chosen` and `rejected`, not {row_named(row)}")
    asked = next((field for field in _ASKED if row.get(field) is not None), "instruction")
    question = _question(row, asked, compat)
    require(row, "chosen", "rejected")
    past = [] if compat else _history(row.get("history"))
    more = () if compat else ("history", "score_delta", "tools", *BESIDE)
    reader = MessageReader(compat, preference=True)
    chosen, rejected = (
        pairs.answer(row[side], side, given, reader) for side, given in zip(pairs.SIDES, pairs.beside_both(row, compat))
    )
    return Preference(
        pairs.prompt(row.get("system"), [*(pair[0] for pair in past), question], [pair[1] for pair in past], compat),
        chosen,
        rejected,
        () if compat else read_tools(row),
        pairs.score_delta(row, compat),
        (*unread(row, (asked, "input", "system", *pairs.SIDES, *more)), *reader.unused),
    )


def _question(row: dict[str, Any], asked: str, compat: bool) -> str:
    parts = [text(row[key], key, empty=True) for key in (asked, "input") if row.get(key) is not None]
    question = ("" if compat else "\n").join(part for part in parts if part)
    if not question.strip():
        require(row, asked)
        raise BadRow("empty_text", f"`{asked}` and `input` are empty")
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
