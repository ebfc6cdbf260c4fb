"""The folder an export or a quantised model goes to: what may be replaced there, and one such command at a time.

Used by run.py and by quantize/.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.lock import RunLock
from erniekit.checkpoint.manifest import MANIFEST, Damaged, NoManifest
from erniekit.errors import CheckpointError
from erniekit.files.links import file_inside
from erniekit.files.output import check_name
from erniekit.files.record import NotOurs, some
from erniekit.log import emit

EXPORT, QUANTIZE = "export", "quantize"


def check_target(target: Path, sources: Sequence[Path], command: str = EXPORT) -> None:
    """Raises unless `target` is absent, empty, or an earlier result of this command, unchanged; changes nothing."""
    check_name(target)
    real = Path(os.path.realpath(target))
    for source in sources:
        held = source if Path(os.path.realpath(source)).is_relative_to(real) else file_inside(source, target)
        if held is not None:
            raise CheckpointError(
                "the result would replace what it is made from",
                where=f"{target} holds {held}" + ("" if held == source else ", which is a link"),
                fix="choose another output_dir, or move the source elsewhere",
            )
    check_replaceable(target, command)


def check_replaceable(target: Path, command: str = EXPORT) -> None:
    if not os.path.lexists(target):
        return
    reason = _foreign(target, command)
    if reason:
        raise NotOurs(
            f"{target.name} exists and {reason}",
            where=str(target),
            fix="move it away, or choose another output_dir: only an unchanged earlier result of "
            f"`erniekit {command}` is replaced",
        )


@contextmanager
def one_export(target: Path) -> Iterator[None]:
    """Holds the place for one export, and puts right what a killed one left: an earlier export hidden between its two
    renames comes back, half-written folders go."""
    with RunLock(target.parent, f".erniekit-{target.name}.lock", "another export is writing to this folder"):
        try:
            writer.sweep(target.parent, glob.escape(target.name))
        except OSError as error:
            raise CheckpointError(
                f"cannot clear what a killed export left: {error.strerror or error}",
                where=str(target.parent),
                fix="make the folder writable, or choose another output_dir",
            ) from error
        _note_replaced(target)
        yield


def _note_replaced(target: Path) -> None:
    if not (target / MANIFEST).is_file():
        return
    try:
        info = manifest.load(target).info
    except (Damaged, NoManifest):  # refused by check_target
        return
    kind = next((f"{key} {info[key]}, " for key in ("quant", "gguf", "merge_grid", "layout") if key in info), "")
    emit(f"note     {target} holds an earlier result ({kind}of {info.get('base', '?')}): it is replaced")


def _made_by(info: Mapping[str, Any]) -> str:
    return QUANTIZE if "method" in info else EXPORT


def _foreign(target: Path, command: str) -> str:
    """Why it is not an earlier result of this command, as the end of a sentence; "" where it is."""
    if target.is_symlink():
        return "is a link"
    if not target.is_dir():
        return "is not a folder"
    found = {
        path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    if not found:
        return ""
    if MANIFEST not in found:
        return f"holds {some(sorted(found))}, not written by an export"
    try:
        written = manifest.check(target, "sample")
    except Damaged as error:
        return f"was changed since it was written: {error.what}"
    except NoManifest:
        return f"holds {some(sorted(found))}, not written by an export"
    if "step" in written.info or "state.json" in written.files:
        return "is a checkpoint"
    if (by := _made_by(written.info)) != command:
        return f"is a result of `erniekit {by}`"
    listed = written.files
    unlisted = sorted(found - {MANIFEST, *listed})
    return f"holds {some(unlisted)}, not written by the export" if unlisted else ""
