"""Rows of one answer with a verdict, for stage KTO: `prompt` and `completion`, or any conversation, and `label`.

Called by data/unpaired_source.py. A preference row gives two: its chosen answer is desirable, its rejected one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.data.formats import alpaca, erniekit, messages
from erniekit.data.formats.fields import BadRow, flag, is_preference, named, require
from erniekit.data.preference import Preference
from erniekit.data.unpaired import Unpaired

VERDICTS = ("label", "kto_tag")  # TRL's name, and LLaMA-Factory's


def unpaired(row: Any) -> list[Unpaired]:
    if not isinstance(row, dict):
        raise BadRow(
            "not_an_object", f"a row must be an object with `prompt`, `completion` and `label`, not {named(row)}"
        )
    if is_preference(row):
        pair = _preference(row)
        answers = ((pair.chosen, True), (pair.rejected, False))
        return [Unpaired(pair.prompt, answer, good, pair.tools, pair.unused) for answer, good in answers]
    desirable = _verdict(row)
    pair = _preference(_as_pair({name: value for name, value in row.items() if name not in VERDICTS}))
    return [Unpaired(pair.prompt, pair.chosen, desirable, pair.tools, pair.unused)]


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


def _as_pair(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a preference whose two answers are the same: every format reads those already."""
    if row.get("completion") is not None:
        require(row, "prompt")
        return _answered(row, "completion", row["completion"])
    if row.get("src") is not None:
        require(row, "tgt")
        turns = [row["tgt"]] if isinstance(row["tgt"], str) else row["tgt"]
        if not isinstance(turns, list) or not turns:
            raise BadRow("wrong_type", f"`tgt` must be text or a list of texts, not {named(row['tgt'])}")
        return {**row, "tgt": turns[:-1], "response": [turns[-1], turns[-1]], "sort": [1, 0]}
    if row.get("messages") is not None:
        turns = row["messages"]
        if not isinstance(turns, list) or len(turns) < 2:
            raise BadRow("wrong_type", "`messages` must be a list of a prompt's messages and the answer")
        return {**row, "messages": turns[:-1], "chosen": turns[-1:], "rejected": turns[-1:]}
    if row.get("instruction") is not None:
        require(row, "output")
        return _answered(row, "output", row["output"])
    require(row, "prompt", "completion")
    raise AssertionError("unreachable")


def _answered(row: dict[str, Any], field: str, answer: Any) -> dict[str, Any]:
    rest = {name: value for name, value in row.items() if name != field}
    return {**rest, "chosen": answer, "rejected": answer}


def _preference(row: dict[str, Any]) -> Preference:
    if "response" in row and "sort" in row:
        return erniekit.preference(row, False)
    if row.get("instruction") is not None:
        return alpaca.preference(row, False)
    return messages.preference(row, False)
