"""The `erniekit` format: `src` and `tgt` lists, optional `system`, `label`, `is_system`; or `messages` rows.

Called through the FORMATS table. Validation is ERNIEKit's: what it skipped as invalid is a bad row here.
"""

from __future__ import annotations

from typing import Any

from erniekit.data.formats import messages as messages_format
from erniekit.data.formats.fields import BadRow, flags, require, text, texts
from erniekit.data.types import Conversation, Message


def conversations(row: Any, compat: bool) -> list[Conversation]:
    if not isinstance(row, dict) or ("messages" in row and "src" not in row):
        return messages_format.conversations(row, compat)
    require(row, "src", "tgt")
    questions, answers = texts(row["src"], "src"), texts(row["tgt"], "tgt")
    if len(questions) != len(answers):
        raise BadRow("length_mismatch", f"`src` has {len(questions)} entries, `tgt` has {len(answers)}")
    trained = flags(row.get("label"), "label", len(questions), "turns")
    system = row.get("system")
    if row.get("is_system") == 1:
        system, questions, answers, trained = questions[0], questions[1:], answers[1:], trained[1:]
        if not questions:
            raise BadRow("no_answer", "`is_system` is 1 and `src` holds nothing but the system text")
    return [build(system, questions, answers, trained, compat)]


def build(system: Any, questions: list[str], answers: list[str], trained: list[bool], compat: bool) -> Conversation:
    """Turns are stripped, the system text is not. An empty system text is none (the old reader kept its newline)."""
    said = []
    if system is not None:
        system = text(system, "system", empty=True)
        if system or compat:
            said.append(Message("system", system))
    for question, answer, train in zip(questions, answers, trained):
        said.append(Message("user", question.strip()))
        said.append(Message("assistant", answer.strip(), trained=train))
    return Conversation(tuple(said))
