"""Files that a command writes where a user's own are: the first line ends with a digest of all the rest, so that an
edit shows, wherever the file is copied. Used by recipes/plan_command.py and recipes/plan_timeline.py."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

_CONTENT = "content "


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
    head = first.rpartition(_CONTENT)[0]
    return "ours" if first == head + _ending(mark, head + body) else "edited"


def write_marked(target: Path, mark: str, about: str, body: str, refuse: Callable[[], object]) -> None:
    """Whole or not at all. mark, about: "# written by ...", or as a comment of XML, and what else the first line says.
    refuse: raises where the file must stay; called last, as the file may have been edited since it was looked at."""
    head = f"{mark}{about}; "
    made = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with made.open("x", encoding="utf-8") as file:  # never a file that is there, nor what a link points to
        try:
            file.write(head + _ending(mark, head + body) + body)
            file.close()
            refuse()
            os.replace(made, target)
        finally:
            made.unlink(missing_ok=True)


def _ending(mark: str, rest: str) -> str:
    closing = " -->" if mark.startswith("<!--") else ""
    return f"{_CONTENT}{hashlib.sha256(rest.encode()).hexdigest()[:16]}{closing}\n"
