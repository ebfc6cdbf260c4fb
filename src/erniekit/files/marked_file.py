"""Files that a command writes where a user's own are: the first line holds the digest of the others, so that an edit
shows, wherever the file is copied. Used by recipes/plan_command.py and recipes/plan_timeline.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal


def state_of(target: Path, mark: str) -> Literal["absent", "ours", "edited", "foreign"]:
    """mark: how the first line of such a file begins. A link and a folder are foreign, whatever they hold."""
    if not os.path.lexists(target):
        return "absent"
    if target.is_symlink() or not target.is_file():
        return "foreign"
    with target.open(encoding="utf-8", errors="replace", newline="") as lines:
        first, body = lines.readline(), lines.read()
    if not first.startswith(mark):
        return "foreign"
    return "ours" if first.endswith(_ending(mark, body)) else "edited"


def write_marked(target: Path, mark: str, about: str, body: str, refuse: Callable[[], object]) -> None:
    """Whole or not at all. mark, about: "# written by ...", or as a comment of XML, and what else the first line says.
    refuse: raises where the file must stay; called last, as the file may have been edited since it was looked at."""
    made = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        made.write_text(f"{mark}{about}; {_ending(mark, body)}{body}", encoding="utf-8")
        refuse()
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)


def _ending(mark: str, body: str) -> str:
    closing = " -->" if mark.startswith("<!--") else ""
    return f"content {hashlib.sha256(body.encode()).hexdigest()[:16]}{closing}\n"
