"""The `alpaca` format: `instruction`, `input`, `output`, optional `system` and `history` of (user, assistant) pairs.

Called through the FORMATS table. `compat` joins instruction and input without a separator and ignores history.
"""

from __future__ import annotations

from typing import Any

from erniekit.data.formats.erniekit import build
from erniekit.data.formats.fields import BadRow, named, require, text
from erniekit.data.types import Conversation


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `instruction` and `output`, not {named(row)}")
    parts = [text(row[key], key, empty=True) for key in ("instruction", "input") if row.get(key) is not None]
    question = ("" if compat else "\n").join(part for part in parts if part)
    if not question.strip():
        require(row, "instruction")
        raise BadRow("empty_text", "`instruction` and `input` are empty")
    require(row, "output")
    past = [] if compat else _history(row.get("history"))
    questions = [pair[0] for pair in past] + [question]
    answers = [pair[1] for pair in past] + [text(row["output"], "output")]
    return [build(row.get("system"), questions, answers, [True] * len(answers), compat)]


def _history(value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"`history` must be a list of [user, assistant] pairs, not {named(value)}")
    out = []
    for i, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow("wrong_type", f"`history[{i}]` must be a pair [user, assistant]")
        out.append((text(pair[0], f"history[{i}][0]"), text(pair[1], f"history[{i}][1]")))
    return out
