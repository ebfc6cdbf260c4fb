"""The `erniekit` format: `src` and `tgt` lists, optional `system`, `label`, `is_system`; or `messages` rows.

Preference rows have one `src` more than `tgt`, two `response`s and how they `sort`. Called through the tables of
formats/. Validation is ERNIEKit's: what it skipped as invalid is a bad row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from erniekit.data.formats import messages as messages_format
from erniekit.data.formats import pairs
from erniekit.data.formats.fields import BadRow, flag, flags, holds, named, refuse_tools, require, text, texts, unread
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict) or ("messages" in row and "src" not in row):
        return messages_format.conversations(row, compat)
    if not compat:
        refuse_tools(row)
    require(row, "src", "tgt")
    questions, answers = texts(row["src"], "src"), texts(row["tgt"], "tgt")
    if len(questions) != len(answers):
        raise BadRow("length_mismatch", f"`src` has {len(questions)} entries, `tgt` has {len(answers)}")
    trained = flags(row.get("label"), "label", len(questions), "turns")
    system, unused = row.get("system"), unread(row, ("src", "tgt", "label", "system", "is_system"))
    if _first_is_system(row, compat):
        unused += _replaced(row)
        system, questions, answers, trained = questions[0], questions[1:], answers[1:], trained[1:]
        if not questions:
            raise BadRow("no_answer", "`is_system` is 1 and `src` holds nothing but the system text")
    return [build(system, questions, answers, trained, compat, unused)]


def _first_is_system(row: dict[str, Any], compat: bool) -> bool:
    value = row.get("is_system")
    return value == 1 if compat or value is None else flag(value, "is_system")


def _replaced(row: dict[str, Any]) -> list[str]:
    """What a row with `is_system` holds besides its first `src`: another system text, and the answer to it."""
    return [name for name, value in (("system", row.get("system")), ("tgt[0]", row.get("tgt"))) if holds(value)]


def build(
    system: Any,
    questions: list[str],
    answers: list[str],
    trained: list[bool],
    compat: bool,
    unused: Sequence[str] = (),
) -> Conversation:
    """White space of turns is kept; the old reader stripped it. An empty system text is none (it kept its newline)."""
    messages = []
    if system is not None:
        system = text(system, "system", empty=True)
        if system or compat:
            messages.append(ChatMessage("system", system))
    for question, answer, train in zip(questions, answers, trained):
        messages.append(ChatMessage("user", question.strip() if compat else question))
        messages.append(ChatMessage("assistant", answer.strip() if compat else answer, trained=train))
    return Conversation(tuple(messages), unused=tuple(unused))


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict) or ("chosen" in row and "src" not in row):
        return messages_format.preference(row, compat)
    if not compat:
        refuse_tools(row)
    require(row, "src", "response", "sort")
    questions = texts(row["src"], "src")
    answers = texts(row["tgt"], "tgt") if row.get("tgt") else []
    if len(questions) != len(answers) + 1:
        raise BadRow(
            "length_mismatch",
            f"`src` has {len(questions)} entries and `tgt` {len(answers)}; `src` needs one more than `tgt`, "
            "the question that `response` answers",
        )
    better, worse, delta = _ranked(row)
    system, unused = row.get("system"), unread(row, ("src", "tgt", "response", "sort", "system", "is_system"))
    if _first_is_system(row, compat):
        unused += _replaced(row)
        system, questions, answers = questions[0], questions[1:], answers[1:]
        if not questions:
            raise BadRow("no_question", "`is_system` is 1 and `src` holds nothing but the system text")
    return Preference(
        pairs.prompt(system, questions, answers, compat),
        pairs.answer(row["response"][better], f"response[{better}]"),
        pairs.answer(row["response"][worse], f"response[{worse}]"),
        score_delta=1.0 if compat else delta,
        unused=tuple(unused),
    )


def _ranked(row: dict[str, Any]) -> tuple[int, int, float]:
    """Which response is better, which is worse, and by how much."""
    for field in ("response", "sort"):
        value = row[field]
        if not isinstance(value, list):
            raise BadRow("wrong_type", f"`{field}` must be a list of two, not {named(value)}")
        if len(value) != 2:
            raise BadRow("length_mismatch", f"`{field}` must have two entries, it has {len(value)}")
    first, second = (pairs.number(value, f"sort[{i}]") for i, value in enumerate(row["sort"]))
    if first == second:
        raise BadRow("tie", f"`sort` gives both responses {first:g}; the better one needs the higher number")
    return (0, 1, first - second) if first > second else (1, 0, second - first)
