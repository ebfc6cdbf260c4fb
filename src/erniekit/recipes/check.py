"""The result of one of the doctor's checks. Filled by doctor.py and, for vision-language models, vision_checks.py."""

from __future__ import annotations

from dataclasses import dataclass

MOVED_BY_ROUNDING = 0.05  # of the logits' spread; a token that attends to another document moves by about all of it


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    text: str
    fix: str = ""
