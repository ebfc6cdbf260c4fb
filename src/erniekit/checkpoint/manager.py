"""When a save counts, what is kept, and which checkpoint a run goes on from.
Used by recipes/ and collective.py (`save`, `check`, `latest_good`); folders are `<output_dir>/checkpoint-<step>`."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.lock import RunLock
from erniekit.checkpoint.manifest import Damaged, NoManifest, Verify, depth_of, has_manifest, is_folder, unreadable
from erniekit.checkpoint.writer import AsyncSaver, Write
from erniekit.errors import CheckpointError
from erniekit.files.listed import Listed
from erniekit.log import warn, warn_once
from erniekit.printable import counted

TIMED = "timed"  # in a manifest's info: saved because time had passed (save_minutes), on no schedule
_NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other folder."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else None


class CheckpointManager:
    """`with CheckpointManager(output_dir) as manager:` holds the folder's lock; without it, only look."""

    def __init__(
        self,
        output_dir: Path,
        keep_last: int | None = 2,
        keep_every: int = 0,
        verify: Verify = "auto",
        async_save: bool = False,
        max_misses: int = 3,
    ) -> None:
        if keep_last is not None and keep_last < 2:
            warn_once(f"keeping 2 checkpoints, not {keep_last}: were the only one damaged, the run would be lost")
            keep_last = 2
        self.output_dir = Path(output_dir)
        self.keep_last = keep_last  # None keeps all
        self.keep_every = keep_every  # steps; 0 for none
        self.verify_mode, self.async_save, self.max_misses = verify, async_save, max_misses
        self.misses = 0  # saves that failed since the last good one
        self._best: list[int] = []  # steps named as the best, the newest last
        self._written: set[int] = set()  # steps of this run's own: one of them may be saved again
        self._lock = RunLock(self.output_dir)
        self._saver = AsyncSaver()

    def start(self) -> CheckpointManager:
        """Take the folder (refused when another run has it) and clear what a killed run left half done."""
        self._lock.acquire()
        try:
            writer.sweep(self.output_dir, "checkpoint-*")
        except OSError as error:
            self._lock.release()
            raise CheckpointError(
                f"cannot clear what a killed run left: {error.strerror or error}",
                where=str(self.output_dir),
                fix="check the disk and the folder's permissions",
            ) from error
        return self

    def close(self) -> None:
        """Wait for the save in flight; a failed one raises, as it was the last."""
        try:
            self._settle(self._saver.wait, final=True)
        finally:
            self._lock.release()

    def __enter__(self) -> CheckpointManager:
        return self.start()

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            warn(str(error))  # the error on its way out is the one to see

    def save(
        self,
        step: int,
        write: Write,
        info: dict[str, Any] | None = None,
        expected_bytes: int = 0,
        *,
        final: bool = False,
    ) -> Path | None:
        """The new folder, or None when it is not there: it failed (training goes on), or is being written.

        Raises after `max_misses` failures in a row, and at once for the `final` save. With `async_save`,
        `write` must hold copies in host memory; a second save waits for the first.
        """
        self.wait()
        job = functools.partial(self._publish, step, write, {"step": step, **(info or {})}, expected_bytes)
        if self.async_save and not final:
            self._saver.start(job)
            return None
        return self.output_dir / f"checkpoint-{step}" if self._settle(job, final) else None

    def check(self) -> None:
        """Call it every step: reports a background save that failed."""
        self._settle(self._saver.check)

    def wait(self) -> None:
        self._settle(self._saver.wait)

    def protect(self, step: int | None) -> None:
        """The best checkpoint: rotation keeps it until another one is named and on disk."""
        self._best = [] if step is None else [*self._best, step]

    def list(self) -> Sequence[Path]:
        """Published folders, oldest step first; none of them checked."""
        steps = [(step, path) for path in self._entries() if (step := step_of(path)) is not None]
        return [path for _, path in sorted(steps) if is_folder(path)]

    def _entries(self) -> Sequence[Path]:
        try:
            return [*self.output_dir.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(self.output_dir, error) from error

    def _step_inside(self, point: Path | None) -> int | None:
        """The step of a checkpoint of this very folder; None for any other."""
        inside = point is not None and point.parent.resolve() == self.output_dir.resolve()
        return step_of(point) if inside and point is not None else None

    def begin(self, point: Path | None) -> None:
        """From here on the run that goes on from `point` (None: from the first step) saves into the folder. Whatever
        lies ahead of it is of another branch, or of another run: it is set aside, so that no save can replace it and
        no resume can take it for this run's."""
        last = self._step_inside(point)
        self._written = {last} if last is not None else set()
        for path in self.list():
            step = step_of(path)
            if step is not None and (last is None or step > last) and has_manifest(path):
                at = f"resumes from step {last}" if last is not None else "does not resume from it"
                self._keep_aside(path, f"this run {at}")

    def refuse_foreign(self, point: Path | None) -> None:
        """Raises for folders after `point` whose names a later save may need and that are not ours to move."""
        last = self._step_inside(point)
        foreign = [p for p in self.list() if not has_manifest(p) and (last is None or (step_of(p) or 0) > last)]
        if foreign:
            raise CheckpointError(
                f"{_names(foreign)} in output_dir: no MANIFEST.json, so another program wrote it or the file is gone",
                where=str(self.output_dir),
                fix="choose another output_dir, or move what is yours elsewhere; erniekit changes nothing in it",
            )

    def verify(self, path: Path, mode: Verify | None = None) -> None:
        """Raises CheckpointError naming the file that is not what was saved."""
        manifest.check(path, depth_of(mode or self.verify_mode, manifest.load(path).total_bytes))
        listed = Listed(path)
        for name in listed.added():  # readers ignore it; the user gets a warning
            listed.allows(name)

    def latest_good(self, launch: str = "") -> Path | None:
        """The newest checkpoint that verifies; damaged newer ones are set aside. None: nothing saved yet.

        launch: only those that this launch saved (`info["launch"]`). One that cannot be read raises `Unreadable`.
        """
        self.wait()
        damaged = [] if launch else [path for path in self._entries() if ".corrupt-" in path.name]
        for path in reversed(self.list()):
            try:
                if launch and manifest.load(path).info.get("launch") != launch:
                    continue
                self.verify(path)
                return path
            except CheckpointError as error:
                if not is_folder(path):  # the run that owns the folder rotated it away while we read
                    continue
                if isinstance(error, NoManifest):
                    warn(f"{path.name} is passed over: {error.what}")
                    continue
                if not isinstance(error, Damaged):
                    raise
                damaged.append(path)
                warn(f"{path.name} is damaged and will not be used: {error.what}")
                if self._lock.held:
                    self._set_aside(path, "corrupt")
        if damaged and not launch:
            raise Damaged(
                f"every checkpoint in this folder is damaged ({len(damaged)} found)",
                where=str(self.output_dir),
                fix="put a good copy of one back under its name, or choose another output_dir to start from the first "
                "step; a checkpoint-N.corrupt-1 that was renamed for a fault of the disk may be named checkpoint-N "
                "again, and is checked once more",
            )
        return None

    def newest_whole(self, before: int | None = None) -> Path | None:
        """The newest checkpoint with every file of its manifest, by size: for an error's advice, nothing is hashed or
        renamed. before: a step; later ones do not count."""
        try:
            paths = self.list()
        except CheckpointError:
            return None
        for path in reversed(paths):
            if before is not None and (step_of(path) or 0) >= before:
                continue
            with contextlib.suppress(CheckpointError):
                manifest.check(path, "size")
                return path
        return None

    def _publish(self, step: int, write: Write, info: dict[str, Any], expected_bytes: int) -> None:
        name = f"checkpoint-{step}"
        self._clear_the_way(step)
        self._written.add(step)
        path = writer.publish(self.output_dir, name, write, info=info, expected_bytes=expected_bytes)
        # its hashes were taken from the bytes just written, so only "full" reads them once more
        self.verify(path, "full" if self.verify_mode == "full" else "size")
        self.misses = 0
        self._rotate()

    def _clear_the_way(self, step: int) -> None:
        """Later steps are of an abandoned branch: a resume must not pick those. One of this very step is replaced
        only where this run wrote it. A folder without our manifest is not ours to move."""
        for path in self.list():
            other = step_of(path)
            assert other is not None
            if other < step or (other == step and other in self._written):
                continue
            if has_manifest(path):
                self._keep_aside(path, f"this run is at step {step}")
            elif other == step:
                raise CheckpointError(
                    f"{path.name} was not written: a folder of that name is there and has no MANIFEST.json",
                    where=str(self.output_dir),
                    fix="move it elsewhere; erniekit changes nothing in it",
                )

    def _rotate(self) -> None:
        """Only after the new one is published and checked. A failed deletion costs space, not the run."""
        try:
            ours = [path for path in self.list() if has_manifest(path)]
        except CheckpointError as error:
            warn(f"no old checkpoint was deleted this time: {error.what}")
            return
        there = {step_of(path) for path in ours}
        on_disk = [k for k, step in enumerate(self._best) if step in there]
        self._best = self._best[on_disk[-1] if on_disk else 0 :]  # a best whose save failed replaces none
        for path in ours[: -(self.keep_last or 2)]:
            if self.keep_last is None and not _is_timed(path):
                continue
            step = step_of(path)
            if step in self._best or (self.keep_every and step is not None and step % self.keep_every == 0):
                continue
            discard_unchanged(path)

    def _keep_aside(self, path: Path, why: str) -> None:
        kept = self._set_aside(path, "aside")
        warn(f"{path.name} is of another branch or run ({why}): kept as {kept.name}")

    def _set_aside(self, path: Path, suffix: str) -> Path:
        number = 1
        while (target := path.with_name(f"{path.name}.{suffix}-{number}")).exists():
            number += 1
        try:
            writer.ops.rename(path, target)
        except OSError as error:
            raise CheckpointError(
                f"cannot rename {path.name} to {target.name}: {error.strerror or error}",
                where=str(path.parent),
            ) from error
        return target

    def _settle(self, job: Any, final: bool = False) -> bool:
        """Run a save, or collect a background one, and count its failure."""
        try:
            job()
            return True
        except CheckpointError as error:
            self.misses += 1
            safe = self._newest()
            if final or self.misses >= self.max_misses:
                # CollectiveSaves, for which every save is a final one, counts them by itself.
                many = "" if final else f"{counted(self.misses, 'save')} failed in a row, "
                raise CheckpointError(f"{error.what}; {many}{safe}", where=error.where, fix=error.fix) from error
            warn(f"CHECKPOINT NOT SAVED: {error.what} ({self.misses} of {self.max_misses} in a row; {safe})")
            return False

    def _newest(self) -> str:
        try:
            newest = next(reversed(self.list()), None)
        except CheckpointError as error:
            return f"and {error.what}"
        return f"the newest one on disk is {newest.name}" if newest else "there is none on disk yet"


def discard_unchanged(path: Path) -> None:
    """Delete an old checkpoint unless it holds files its manifest does not list; a link is removed, not followed."""
    try:
        added = [] if path.is_symlink() else manifest.unlisted(path)
        if added:
            warn_once(f"{path} is kept: it holds {added[0]}, which erniekit did not write")
            return
        writer.discard(path)
    except CheckpointError as error:
        warn(f"the old {path.name} is kept: {error.what}")
    except OSError as error:
        warn(f"could not delete the old {path.name}: {error.strerror or error}")


def _names(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more


def _is_timed(path: Path) -> bool:
    try:
        return bool(manifest.load(path).info.get(TIMED))
    except CheckpointError:  # damaged, or not ours: it is kept
        return False
