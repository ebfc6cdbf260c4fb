"""The final model in output_dir: copies of a checkpoint's weight files; editing them leaves the checkpoint as it is.

Called by recipes/finish.py. Replaces and removes only files that an earlier end of the run put there, by the folder's
record, unchanged since.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.manifest import FileRecord, Manifest
from erniekit.errors import CheckpointError
from erniekit.files.record import Content, NotOurs, OwnedFiles
from erniekit.log import warn

USE = "model"
_BLOCK = 16 << 20  # bytes copied at a time
_FICLONE = 0x40049409  # Linux: share the blocks of two files until one is written to (btrfs, XFS)


def publish_model(checkpoint: Path, output: Path, progress: Callable[[], None] = lambda: None) -> None:
    """The checkpoint's files that make it a model appear in `output`; those of a model published there before, if it
    had others, are removed."""
    records = model_files(manifest.load(checkpoint))
    owned = OwnedFiles(output)
    before = {name for name, entry in owned.entries().items() if entry.use == USE}
    try:
        if blocked := owned.in_the_way(list(records)):
            raise NotOurs(f"{', '.join(blocked[:3])} is in the way, and was not written by this run or changed since")
        writer.require_space(output, "the final model", sum(record.size for record in records.values()))
        contents = {}
        for name, record in records.items():
            _copy(checkpoint / name, output / f".new-{name}", progress)
            mtime = (output / f".new-{name}").stat().st_mtime_ns
            contents[name] = Content(record.size, record.sha256, mtime, record.sample)
        owned.claim_content(contents, USE)
        for name in records:  # all at once, as far as a disk can: a kill in between leaves run.json unfinished
            writer.ops.rename(output / f".new-{name}", output / name)
    except (OSError, NotOurs, CheckpointError) as error:
        what = error.strerror or str(error) if isinstance(error, OSError) else error.what
        raise CheckpointError(
            f"the final model was not put into output_dir: {what}",
            where=str(output),
            fix=f"it is whole in {checkpoint}; make room there and run the same command again",
        ) from error
    for name in sorted(before - records.keys()):
        if os.path.lexists(output / name) and not owned.remove(name):
            warn(f"{output / name} belongs to an earlier model but was changed since: left as it is")


def model_files(saved: Manifest) -> dict[str, FileRecord]:
    """The files of a checkpoint that make it a model for any program: all but the state a resume needs."""
    state = ("optimizer", "master_weights", "state.json")
    return {name: record for name, record in saved.files.items() if not name.startswith(state) and "/" not in name}


def _copy(source: Path, target: Path, progress: Callable[[], None]) -> None:
    """A file with its own blocks, or blocks that are copied when either side is written to."""
    with contextlib.suppress(FileNotFoundError):
        writer.ops.unlink(target)  # of a run that was killed here
    fd = writer.ops.create(target)
    with source.open("rb") as read, os.fdopen(fd, "wb") as out:
        if not _share_blocks(read.fileno(), fd):
            while block := read.read(_BLOCK):
                out.write(block)
                progress()
        out.flush()
        os.fsync(fd)


def _share_blocks(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return True
    except OSError:  # most file systems cannot
        return False
