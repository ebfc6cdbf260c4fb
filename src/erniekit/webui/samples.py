"""Samples: answers that a run generated while it was evaluated, with the thinking part folded. Used by job_monitor.py.

`<output_dir>/samples.jsonl` has one object a line: global_step, prompt, answer, reference. Everything is escaped.
"""

from __future__ import annotations

import json
import os
import re
from html import escape
from pathlib import Path
from typing import Any

FILE = "samples.jsonl"
MAX_BYTES = 256 * 1024  # read from the end of the file
MAX_SHOWN = 8
MAX_TEXT = 4000  # characters of one text
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)


def last_samples(folder: Path) -> list[dict[str, Any]]:
    """The samples of the last evaluation, at most MAX_SHOWN."""
    try:
        with (folder / FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_BYTES))
            lines = file.read(MAX_BYTES).split(b"\n")[1 if size > MAX_BYTES else 0 :]
    except OSError:
        return []
    rows = [row for line in lines if (row := _parsed(line))]
    last = rows[-1]["global_step"] if rows else None
    return [row for row in rows if row["global_step"] == last][:MAX_SHOWN]


def thought_and_answer(text: str) -> tuple[str, str]:
    """The part between <think> marks at the beginning, and the rest."""
    match = _THOUGHT.match(text)
    return (match[1].strip(), text[match.end() :].strip()) if match else ("", text)


def samples_html(rows: list[dict[str, Any]], labels: dict[str, str]) -> str:
    """`labels`: title (with a {step}), prompt, answer, expected and thinking in the reader's language."""
    if not rows:
        return ""
    title = labels["title"].format(step=rows[-1]["global_step"])
    cards = "".join(_card(row, labels) for row in rows)
    return f'<div class="ek-title">{escape(title)}</div>{cards}'


def folded(text: str, title: str) -> str:
    """A thought, closed until it is clicked; escaped."""
    return f'<details class="ek-thought"><summary>{escape(title)}</summary>{_text(text)}</details>' if text else ""


def _card(row: dict[str, Any], labels: dict[str, str]) -> str:
    thought, answer = thought_and_answer(str(row.get("answer", "")))
    parts = [
        _part(labels["prompt"], _text(str(row.get("prompt", "")))),
        _part(labels["answer"], folded(thought, labels["thinking"]) + _text(answer)),
    ]
    if row.get("reference"):
        thought, answer = thought_and_answer(str(row["reference"]))
        parts.append(_part(labels["expected"], folded(thought, labels["thinking"]) + _text(answer)))
    return f'<div class="ek-sample">{"".join(parts)}</div>'


def _part(title: str, html: str) -> str:
    return f'<div class="ek-part"><header>{escape(title)}</header>{html}</div>'


def _text(text: str) -> str:
    return f'<div class="ek-text">{escape(text[:MAX_TEXT])}{"…" if len(text) > MAX_TEXT else ""}</div>'


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("global_step"), int) else {}
