"""Rows, and rows to a file, one per line. Called by tests of every folder that write a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = ["river", "lantern", "copper", "the quiet harbor", "河边的灯很亮", "1234"]


def small_row(i: int, **extra: object) -> dict[str, Any]:
    """One question and its answer, both of a few tokens and other ones for every i."""
    asked, said = WORDS[i % 6], WORDS[(i * 7 + 1) % 6]
    return {"src": [f"{asked} {i}"], "tgt": [f"{said} {said} {i % 17}"], **extra}


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    """A row that is text or bytes already is written as it is: broken lines are made so."""
    lines = (row if isinstance(row, str | bytes) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path
