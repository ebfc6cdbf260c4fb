"""<output_dir>/samples.jsonl: prompt, generated answer and reference of every evaluation. Read by report.py.

recipes/generation_eval.py writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from erniekit.track import jsonl
from erniekit.track.jsonl import keep_until

FILE = "samples.jsonl"
COLUMNS = ("prompt", "answer", "reference", "exact_match")

__all__ = ["COLUMNS", "FILE", "keep_until", "last_samples"]


def last_samples(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """The last evaluation's step and its samples; none where nothing was generated."""
    rows = list(jsonl.read(folder / FILE))
    step = max((row["global_step"] for row in rows), default=0)
    return step, [{name: row.get(name) for name in COLUMNS} for row in rows if row["global_step"] == step]
