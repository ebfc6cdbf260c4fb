"""Rows of one answer with a verdict, for stage KTO: `prompt` and `completion`, or any conversation, and `label`.

In the table of data/formats, for data/unpaired_source.py. A preference row gives two: its chosen
answer is desirable, its rejected one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.data.formats import PREFERENCE_FORMATS, alpaca, erniekit, messages, sharegpt
from erniekit.data.formats.answers import beside
from erniekit.data.formats.detection import guess_pair
from erniekit.data.formats.fields import BadRow, flag, is_preference, require, row_named
from erniekit.data.formats.message import MessageReader
from erniekit.data.formats.pairs import SIDES
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage
from erniekit.data.unpaired import Unpaired

VERDICTS = ("label", "kto_tag")  # TRL's name, and LLaMA-Factory's


def unpaired(row: Any) -> list[Unpaired]:
    if not isinstance(row, dict):
        raise BadRow(
            "not_an_object", f"a row must be an object with `prompt`, `completion` and `label`, not {row_named(row)}"
        )
    if is_preference(row):
        pair = _preference(row)
        answers = ((pair.chosen, True), (pair.rejected, False))
        return [Unpaired(pair.prompt, answer, good, pair.tools, pair.unused) for answer, good in answers]
    desirable = _verdict(row)
    rest = {name: value for name, value in row.items() if name not in VERDICTS}
    if row.get("completion") is not None:
        require(row, "prompt")
        pair = messages.preference(_twice(rest, "completion"), False)
        return [Unpaired(pair.prompt, pair.chosen, desirable, pair.tools, pair.unused)]
    said, tools, unused = _conversation(rest)
    return [Unpaired(said[:-1], said[-1:], desirable, tools, unused)]


def _verdict(row: Mapping[str, Any]) -> bool:
    given = [name for name in VERDICTS if row.get(name) is not None]
    if not given:
        require(row, "label")
    value = row[given[0]]
    if isinstance(value, list):
        raise BadRow("bad_label", f"`{given[0]}` is a list; stage KTO takes one verdict a row: true or false")
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return flag(value, given[0])


def _conversation(
    row: dict[str, Any],
) -> tuple[tuple[ChatMessage, ...], tuple[dict[str, Any], ...], tuple[str, ...]]:
    """What a row of any format says, its tools, and the names of fields that are not used."""
    if row.get("messages") is not None:
        said, unused = messages.read_messages(row, False, reader=MessageReader(False, preference=True))
        return said, messages.read_tools(row), unused
    if row.get("conversations") is not None:
        reader = sharegpt.ShareGptReader(False, preference=True)
        said, unused = messages.read_messages(row, False, sharegpt.FIELD, reader)
        return said, sharegpt.read_tools(row), unused
    if row.get("src") is None and row.get("instruction") is None:
        require(row, "prompt", "completion")
    # With tools one conversation per answer, each the beginning of the next.
    found = (erniekit if row.get("src") is not None else alpaca).conversations(row, False)[-1]
    return found.messages, found.tools, found.unused


def _twice(row: dict[str, Any], field: str) -> dict[str, Any]:
    """The row as a preference whose two answers are the same: texts, messages and lists of them are read there."""
    rest = {name: value for name, value in row.items() if name != field}
    beside_answer = {name: {side: value for side in SIDES} for name, value in beside(row).items()}
    return {**rest, **beside_answer, **{side: row[field] for side in SIDES}}


def _preference(row: dict[str, Any]) -> Preference:
    pair: Preference = PREFERENCE_FORMATS.get(guess_pair(row).format)(row, False)
    return pair
