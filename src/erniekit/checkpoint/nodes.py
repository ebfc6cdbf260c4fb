"""Nodes that share no disk: find out, bring a published checkpoint to each of them, and resume all from the same one.

Called on every rank. "Leaders" are one rank of each node. Files travel over a gloo group along a chain of leaders, each
passing on what it gets while it writes, so that many nodes take hardly longer than one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit.checkpoint import writer
from erniekit.checkpoint.manager import CheckpointManager, discard_unchanged, step_of
from erniekit.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileRecord,
    Manifest,
    NoManifest,
    Unreadable,
    has_manifest,
    is_folder,
    unreadable,
)
from erniekit.checkpoint.wire import TIMEOUT, Wire
from erniekit.errors import CheckpointError
from erniekit.log import emit, warn
from erniekit.parallel import comm
from erniekit.printable import counted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK = 16 << 20  # bytes a message
_LOOKS, _PAUSE = 4, 0.25  # a network disk may show another node's new file a moment later


def nodes_without(output_dir: Path, leaders: Sequence[int], rank: int, group: ProcessGroup | None) -> list[int]:
    """The leaders whose node does not see rank 0's output_dir: rank 0 puts a file there, the others look for it."""
    if group is None:
        return []
    token, problem = output_dir / f".seen-{secrets.token_hex(8)}", ""
    if rank == 0:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            problem = f"rank 0 cannot write into {output_dir}: {error.strerror or error}"
    name, problem = comm.broadcast_object((token.name, problem), 0, group)
    if problem:
        raise CheckpointError(problem, where="output_dir", fix="make the folder writable, or choose another")
    blind = rank in leaders and not _exists_soon(output_dir / name)
    found = comm.gather_objects(rank if blind else None, group)
    if rank == 0:
        token.unlink(missing_ok=True)
    return [r for r in found if r is not None]


def copy_to_nodes(
    path: Path,
    targets: Sequence[int],
    rank: int,
    group: ProcessGroup | None,
    *,
    source: int = 0,
    keep: Sequence[str] | None = None,
    set_aside: bool = False,
    timeout: float = TIMEOUT,
) -> None:
    """The published folder `path` of rank `source` at the same path on the nodes of `targets`, one rank of each.

    There it is checked against the manifest and appears whole or not at all. keep: the source's checkpoints by name;
    others of ours on a target are rotated away as they were there. set_aside: a folder of that name is the user's and
    is kept. Raises on the source, naming the ranks that do not have it.
    """
    chain = [source, *targets]
    if rank not in chain or len(chain) == 1:
        return
    place = chain.index(rank)
    onward = chain[place + 1] if place + 1 < len(chain) else None
    wire = Wire(group, timeout)
    if place == 0:
        assert onward is not None
        _send_folder(path, onward, wire, {"keep": keep, "set_aside": set_aside})
        _collect(path, targets, wire)
        return
    header = wire.receive_json(chain[place - 1])
    stream = _Stream(wire, chain[place - 1], onward, header.get("sizes", []))
    if onward is not None:
        wire.send_json(onward, header)
    wire.send_json(source, _receive_folder(path, header, stream))


def copier(
    manager: CheckpointManager, targets: Sequence[int], rank: int, group: ProcessGroup | None
) -> Callable[[Path], None] | None:
    """For `CollectiveSaves(after=...)`, with its group: checkpoints go to these nodes too, and leave them again."""
    if not targets:
        return None

    def copy(path: Path) -> None:
        keep = [p.name for p in manager.list()] if manager.keep_last is not None else None
        copy_to_nodes(path, targets, rank, group, keep=keep)

    return copy


def agree_on_checkpoint(
    find: Callable[[], Path | None],
    output_dir: Path,
    leaders: Sequence[int],
    rank: int,
    group: ProcessGroup | None,
    shared: bool = True,
    timeout: float = TIMEOUT,
) -> Path | None:
    """The checkpoint all ranks go on from, there on every node; None when no node has one. All ranks call it.

    `find()` returns what this node has: in its output_dir (whose path may differ from node to node) or at a path that
    is the same on all. On a shared folder only rank 0 looks. Else the newest that any node has is used, also when rank
    0 lost its own, and nodes without it, or with other bytes under its name, receive it.
    """
    if group is None:
        return find()
    mine = _look(find, output_dir) if rank == 0 or (rank in leaders and not shared) else _Found()
    found: list[_Found] = comm.gather_objects(mine, group)
    good = [r for r, f in enumerate(found) if f.name]
    # What a node cannot read now may be the newest there is: no other node's older one takes its place.
    problem = next((f.problem for f in found if f.problem and (f.passing or not good)), None)
    if problem:
        raise CheckpointError(**problem)
    if not good:
        return None
    source = max(good, key=lambda r: (found[r].step, -r))
    best = found[source]
    path = output_dir / best.name  # a path of its own stays what it is
    targets = [] if shared else [r for r in leaders if (found[r].name, found[r].seal) != (best.name, best.seal)]
    if source != 0:
        emit(f"note     {path.name} comes from the node of rank {source}: rank 0's own folder has nothing as new")
    together(lambda: copy_to_nodes(path, targets, rank, group, source=source, set_aside=True, timeout=timeout), group)
    return path


def together(work: Callable[[], None], group: ProcessGroup | None) -> None:
    """All ranks call it; a CheckpointError of one is raised on every rank, so that none waits for those that left."""
    problem = None
    try:
        work()
    except CheckpointError as error:
        if group is None:
            raise
        problem = _fields_of(error)
    problem = next((p for p in comm.gather_objects(problem, group) if p), None) if group is not None else None
    if problem:
        raise CheckpointError(**problem)


def _fields_of(error: CheckpointError) -> dict[str, str]:
    return {"what": error.what, "where": error.where, "fix": error.fix}


@dataclass(frozen=True)
class _Found:
    name: str = ""  # of a folder in output_dir, or a whole path elsewhere
    step: int = -1
    seal: str = ""  # the manifest's own hash, and it has that of every file
    problem: dict[str, str] | None = None
    passing: bool = False  # the problem may pass: the files on disk may be good


def _look(find: Callable[[], Path | None], output_dir: Path) -> _Found:
    try:
        path = find()
        if path is None:
            return _Found()
        seal = _seal(path)
        name = path.name if path.parent == output_dir else str(path.absolute())
        return _Found(name, step_of(path) or 0, seal)
    except CheckpointError as error:
        return _Found(problem=_fields_of(error), passing=isinstance(error, Unreadable))


def _seal(folder: Path) -> str:
    if not has_manifest(folder):
        return ""
    try:
        return (folder / MANIFEST).read_bytes()[-80:].decode(errors="replace")
    except OSError as error:
        raise unreadable(folder / MANIFEST, error) from error


# --- one folder along the chain ---


def _send_folder(path: Path, to: int, wire: Wire, header: dict[str, Any]) -> None:
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest = Manifest.from_bytes(raw)
    except (OSError, ValueError, CheckpointError) as error:
        why = error.what if isinstance(error, CheckpointError) else error
        wire.send_json(to, {"problem": f"{MANIFEST} cannot be read at its source: {why}"})
        return
    sizes = [record.size for record in manifest.files.values()]
    wire.send_json(to, {**header, "manifest": raw.decode(), "sizes": sizes})
    for name, record in manifest.files.items():
        for piece in _read(path / name, record.size):
            wire.send(to, piece)


def _read(file: Path, size: int) -> Iterator[torch.Tensor]:
    """Exactly `size` bytes, whatever the file does: what cannot be read is zeros, and the receivers' hashes then
    differ."""
    try:
        handle = file.open("rb", buffering=0)
    except OSError:
        handle = None
    for count in _messages([size]):
        piece = torch.zeros(count, dtype=torch.uint8)
        view, done = piece.numpy().data, 0
        try:
            while handle is not None and done < count and (got := handle.readinto(view[done:])):
                done += got
        except OSError:
            handle = None
        yield piece
    if handle is not None:
        handle.close()


def _collect(path: Path, targets: Sequence[int], wire: Wire) -> None:
    problems = []
    for target in targets:
        try:
            what = wire.receive_json(target).get("what")
        except CheckpointError as error:
            what = error.what
        problems += [f"the node of rank {target}: {what}"] if what else []
    if problems:
        raise CheckpointError(
            f"{path.name} did not reach {len(problems)} of {counted(len(targets), 'other node')}",
            where="; ".join(problems),
            fix=f"copy {path} there, or use an output_dir all nodes share",
        )


class _Stream:
    """The bytes of all files, one after the other; each message is passed on while it is used here."""

    def __init__(self, wire: Wire, source: int, onward: int | None, sizes: Sequence[int]) -> None:
        self.wire, self.source, self.onward = wire, source, onward
        self._left = _messages(sizes)

    def file(self, size: int) -> Iterator[memoryview]:
        while size:
            piece = self.wire.receive(self.source, torch.empty(next(self._left), dtype=torch.uint8))
            size -= piece.numel()
            with self._passing_on(piece):
                yield piece.numpy().data

    def drain(self) -> None:
        """A node whose disk failed still passes on what the next ones wait for."""
        for count in self._left:
            with self._passing_on(self.wire.receive(self.source, torch.empty(count, dtype=torch.uint8))):
                pass

    @contextmanager
    def _passing_on(self, piece: torch.Tensor) -> Iterator[None]:
        if self.onward is None:
            yield
            return
        try:
            with self.wire.sending(self.onward, piece):
                yield
        except CheckpointError:
            if self.onward not in self.wire.lost:
                raise
            self.onward = None  # its process ended; the source finds that its reply is missing


def _messages(sizes: Sequence[int]) -> Iterator[int]:
    for size in sizes:
        for start in range(0, size, CHUNK):
            yield min(CHUNK, size - start)


def _receive_folder(path: Path, header: dict[str, Any], stream: _Stream) -> dict[str, str]:
    if "problem" in header:
        return {"what": header["problem"]}
    manifest = Manifest.from_bytes(header["manifest"].encode())

    def write(folder: Path) -> dict[str, FileRecord]:
        records = {}
        for name, record in manifest.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            records[name] = writer.write_file(folder / name, stream.file(record.size), record.sha256)
            if records[name].sha256 != record.sha256:
                raise Damaged(f"{name} arrived with other bytes than were saved")
        return records

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_folder(path) and not has_manifest(path):
            raise NoManifest(f"the {path.name} there has no {MANIFEST}: it is not erniekit's to replace")
        if header["set_aside"]:
            _set_aside(path)
        writer.publish(path.parent, path.name, write, info=manifest.info, expected_bytes=manifest.total_bytes)
        _rotate_like(path, header["keep"])
        return {}
    except (OSError, CheckpointError) as error:
        stream.drain()
        return {"what": error.what if isinstance(error, CheckpointError) else f"{error.strerror or error}"}


def _rotate_like(path: Path, keep: Sequence[str] | None) -> None:
    """What rank 0 rotated away goes here too; a later step is of an abandoned branch and is set aside, as there."""
    step = step_of(path)
    if keep is None or step is None:
        return
    for old in path.parent.iterdir():
        other = step_of(old)
        if other is None or old.name in keep:
            continue
        try:
            if has_manifest(old):
                _set_aside(old) if other > step else discard_unchanged(old)
        except CheckpointError as error:
            warn(error.what)
        except OSError as error:
            warn(f"could not remove the old {old.name}: {error.strerror or error}")


def _set_aside(path: Path) -> None:
    if path.exists():
        number = 1
        while (target := path.with_name(f"{path.name}.aside-{number}")).exists():
            number += 1
        writer.ops.rename(path, target)


# --- all ranks ---


def _exists_soon(token: Path) -> bool:
    for look in range(_LOOKS):
        if token.exists():
            return True
        if look + 1 < _LOOKS:
            time.sleep(_PAUSE)
    return False
