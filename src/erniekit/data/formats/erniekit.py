"""The `erniekit` format: `src` and `tgt` lists, optional `system`, `label`, `is_system`; or `messages` rows.

Preference rows have one `src` more than `tgt`, two `response`s and how they `sort`. Called through the tables of
formats/. Validation is ERNIEKit's: what it skipped as invalid is a bad row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from erniekit.data.formats import messages as messages_format
from erniekit.data.formats import pairs
from erniekit.data.formats.answers import BESIDE, CALLS, answer_texts, attached, beside
from erniekit.data.formats.fields import BadRow, flag, flags, holds, named, require, text, texts, unread
from erniekit.data.formats.message import MessageReader
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation
from erniekit.printable import counted


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict) or ("messages" in row and "src" not in row):
        return messages_format.conversations(row, compat)
    given = {} if compat else beside(row)
    require(row, "src", *(() if CALLS in given else ("tgt",)))
    questions, answers = texts(row["src"], "src"), answer_texts(row.get("tgt"), "tgt", given)
    if len(questions) != len(answers):
        has = counted(len(questions), "entry", "entries")
        raise BadRow("length_mismatch", f"`src` has {has}, `tgt` has {len(answers)}")
    trained = flags(row.get("label"), "label", len(questions), "turn")
    reader = MessageReader(compat)
    contents = [ChatMessage("assistant", words, train) for words, train in zip(answers, trained)]
    contents = attached(contents, given, "tgt", reader)
    known = ("src", "tgt", "label", "system", "is_system", *(() if compat else (*BESIDE, "tools")))
    system, unused = row.get("system"), unread(row, known)
    if _first_is_system(row, compat):
        unused += _replaced(row)
        system, questions, contents = questions[0], questions[1:], contents[1:]
        if not questions:
            raise BadRow("no_answer", "`is_system` is 1 and `src` holds nothing but the system text")
    tools = () if compat else messages_format.read_tools(row)
    return messages_format.examples(turns(system, questions, contents, compat), tools, (*unused, *reader.unused))


def _first_is_system(row: dict[str, Any], compat: bool) -> bool:
    value = row.get("is_system")
    return value == 1 if compat or value is None else flag(value, "is_system")


def _replaced(row: dict[str, Any]) -> list[str]:
    """What a row with `is_system` holds beside its first `src`: another system text, and the answer to it."""
    return [name for name, value in (("system", row.get("system")), ("tgt[0]", row.get("tgt"))) if holds(value)]


def turns(system: Any, questions: list[str], answers: Sequence[ChatMessage], compat: bool) -> list[ChatMessage]:
    """White space of turns is kept; the old reader stripped it. An empty system text is none (it kept its newline)."""
    said = []
    if system is not None:
        system = text(system, "system", empty=True)
        if system or compat:
            said.append(ChatMessage("system", system))
    for question, answer in zip(questions, answers):
        said.append(ChatMessage("user", question.strip() if compat else question))
        said.append(replace(answer, content=answer.content.strip()) if compat else answer)
    return said


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict) or ("chosen" in row and "src" not in row):
        return messages_format.preference(row, compat)
    require(row, "src", "response", "sort")
    questions = texts(row["src"], "src")
    answers = texts(row["tgt"], "tgt") if row.get("tgt") else []
    if len(questions) != len(answers) + 1:
        raise BadRow(
            "length_mismatch",
            f"`src` has {counted(len(questions), 'entry', 'entries')} and `tgt` {len(answers)}; `src` needs one "
            "more than `tgt`, the question that `response` answers",
        )
    better, worse, delta = _ranked(row)
    known = ("src", "tgt", "response", "sort", "system", "is_system", *(() if compat else (*BESIDE, "tools")))
    system, unused = row.get("system"), unread(row, known)
    if _first_is_system(row, compat):
        unused += _replaced(row)
        system, questions, answers = questions[0], questions[1:], answers[1:]
        if not questions:
            raise BadRow("no_question", "`is_system` is 1 and `src` holds nothing but the system text")
    given, reader = pairs.beside_both(row, compat), MessageReader(compat, preference=True)
    chosen, rejected = (
        pairs.answer(row["response"][place], f"response[{place}]", given[place], reader) for place in (better, worse)
    )
    return Preference(
        pairs.prompt(system, questions, answers, compat),
        chosen,
        rejected,
        () if compat else messages_format.read_tools(row),
        1.0 if compat else delta,
        (*unused, *reader.unused),
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
