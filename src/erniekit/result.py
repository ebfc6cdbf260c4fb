"""RunResult: what a finished command hands to a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

# A variable, 1 where a command trains in a folder that it removes: there is nothing to type next.
REMOVED = "ERNIEKIT_RUN_IS_REMOVED"


@dataclass(frozen=True)
class RunResult:
    """What a finished command gives: its folder, its numbers, and what to type next."""

    output_dir: Path
    metrics: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    next_commands: list[str] = field(default_factory=list)
    note: str = ""  # a remark on the result for the user
