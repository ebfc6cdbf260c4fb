"""Which checkpoint becomes the final model of a run: the requested one, if its bytes are those that were saved.

Called by recipes/finish.py after the last save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from erniekit.checkpoint import manifest
from erniekit.checkpoint.final_model import model_files
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.manifest import Unreadable
from erniekit.errors import CheckpointError


@dataclass(frozen=True)
class FinalChoice:
    path: Path
    note: str = ""  # why it is not the requested one


def choose(manager: CheckpointManager, best: int | None, last: int) -> FinalChoice:
    """The best step's checkpoint, or the last step's where `best` is None; else the newest that verifies, and why.

    A checkpoint that is damaged, missing or cannot be read is passed over and stays where it is: the run has ended,
    and a rerun of the same command looks at it again.
    """
    wanted = manager.output_dir / f"checkpoint-{last if best is None else best}"
    which = "last" if best is None else "best"
    reason = ""
    for path in _in_order(manager, wanted):
        try:
            verify_model(path)
        except CheckpointError as error:
            again = "; run the same command again to try once more" if isinstance(error, Unreadable) else ""
            reason = reason or f"{error.what}{again}"
            continue
        if path == wanted:
            return FinalChoice(path)
        return FinalChoice(
            path, f"FINAL MODEL IS NOT THE {which.upper()} CHECKPOINT but {path.name}; {wanted.name}: {reason}"
        )
    raise CheckpointError(
        f"no checkpoint can become the final model; {wanted.name}, the {which}: {reason}",
        where=str(manager.output_dir),
        fix="check the disk and run the same command again; nothing was renamed or deleted",
    )


def verify_model(checkpoint: Path) -> None:
    """Every byte of the files that become the final model, and the sizes of the others."""
    names = model_files(manifest.load(checkpoint))
    manifest.check(checkpoint, "full", content_of=names.__contains__)


def _in_order(manager: CheckpointManager, wanted: Path) -> Iterator[Path]:
    yield wanted
    yield from (path for path in reversed(manager.list()) if path != wanted)
