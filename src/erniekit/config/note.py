"""Note: one value that follows from others, with its reason. Made by resolve; kept, printed and stored with the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def shown(value: Any) -> str:
    """A value the way a user would write it."""
    if isinstance(value, (list, tuple)):
        return ",".join(shown(v) for v in value) or "none"
    if isinstance(value, dict):
        return "{" + ", ".join([*value][:3]) + (", ..." if len(value) > 3 else "") + "}"
    if isinstance(value, float):
        return f"{value:g}"
    return "''" if value == "" else str(value)


@dataclass(frozen=True)
class Note:
    """`old` equal to `new` is a remark: nothing changed, the user should know."""

    key: str
    old: Any
    new: Any
    reason: str
    quiet: bool = False  # follows so plainly that a run need not print it

    @property
    def changes(self) -> bool:
        return bool(self.old != self.new)

    def __str__(self) -> str:
        value = f"{shown(self.old)} -> {shown(self.new)}" if self.changes else shown(self.new)
        return f"{self.key}: {value} ({self.reason})"
