"""A model's files written by many ranks at once: each by one rank, which gets the parts it lacks from their holders.

Called by gather.py. All ranks make the same plan, so that nothing is requested: a rank sends its parts to each writer
in the order in which that writer assembles its tensors. A thread that sends waits for one writer only, so there is no
cycle of ranks that wait. A rank whose disk fails still receives; one that lacks a part sends the error in its place.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from erniekit import heartbeat
from erniekit.checkpoint import writer
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.one_file import Contents, FileTensor, OneFile, Stretch
from erniekit.checkpoint.parts import CHUNK, DTYPES, Gathered, receive_part, send_part, send_problem
from erniekit.checkpoint.tensor_file import write_stream
from erniekit.checkpoint.wire import Wire
from erniekit.errors import CheckpointError

if TYPE_CHECKING:
    from erniekit.parallel.sharding import Box

LIMIT = 5 * 1000**3
LEAST = 1 << 20  # bytes a message, however many writers a rank sends to at once
DATA = 1  # tag of these messages: signs of life go between the same ranks meanwhile
Holders = Callable[[str], Sequence[tuple[int, Sequence["Box"]]]]
Check = Callable[[str, torch.Tensor], None]


class StoredTensors(Protocol):
    """One of our tensors and those of a file: models.names.Entry of models, lora.together.PartsOfTensor of adapters."""

    @property
    def ours(self) -> str: ...

    @property
    def theirs(self) -> tuple[str, ...]: ...

    @property
    def write(self) -> Callable[[torch.Tensor], list[torch.Tensor]]: ...


@dataclass(frozen=True)
class ModelFiles:
    """The same on all ranks: how our tensors are stored in the files, and the checks of a tensor before that."""

    entries: Sequence[StoredTensors]
    check: Check = lambda name, tensor: None
    tag: str = "pt"  # in the files' headers
    limit: int = LIMIT  # bytes of a file
    one_file: bool = False  # whatever its size, with every rank's tensors in it


@dataclass(frozen=True)
class Source:
    """One of our tensors, and what is stored of it."""

    ours: str
    entries: tuple[StoredTensors, ...]
    stored: tuple[FileTensor, ...]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.stored)


@dataclass(frozen=True)
class FilePlan:
    sources: Mapping[int, Sequence[Source]]  # writer -> in the order it puts them together
    files: Mapping[int, Sequence[tuple[str, Sequence[FileTensor]]]]  # writer -> names and contents
    one: OneFile | None = None  # instead of those: what all of them write into

    @property
    def bytes(self) -> int:
        return sum(source.bytes for sources in self.sources.values() for source in sources)

    @property
    def index(self) -> dict[str, object]:
        placed = {one.name: name for files in self.files.values() for name, content in files for one in content}
        return {"metadata": {"total_size": self.bytes}, "weight_map": placed}


def plan_files(
    model: ModelFiles,
    stem: str,
    shape_of: Callable[[str], Sequence[int]],
    dtype_of: Callable[[str], torch.dtype],
    holders: Holders,
) -> FilePlan:
    """Each tensor goes to the one of its holders that has the least to write so far."""
    whole = [
        _source(ours, tuple(group), torch.empty(tuple(shape_of(ours)), dtype=dtype_of(ours), device="meta"))
        for ours, group in itertools.groupby(model.entries, key=lambda entry: entry.ours)
    ]
    if model.one_file:
        return _plan_one_file(whole, f"{stem}.safetensors", model.tag, holders)
    load: dict[int, int] = {}
    sources: dict[int, list[Source]] = {}
    for source in whole:
        rank = min((rank for rank, _ in holders(source.ours)), key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + source.bytes
        sources.setdefault(rank, []).append(source)
    # The widest first, so that every tensor begins at a multiple of its element.
    order = {rank: sorted(mine, key=lambda s: -s.stored[0].dtype.itemsize) for rank, mine in sorted(sources.items())}
    cut = {rank: _files(mine, model.limit) for rank, mine in order.items()}
    count, numbers = sum(map(len, cut.values())), itertools.count(1)
    named = {
        rank: [(f"{stem}-{next(numbers):05d}-of-{count:05d}.safetensors", content) for content in contents]
        for rank, contents in cut.items()
    }
    return FilePlan(order, named)


def _plan_one_file(whole: Sequence[Source], name: str, tag: str, holders: Holders) -> FilePlan:
    """In the file's order a rank takes stretches until it has its share, of those that hold much of them: few and long
    ones, as each has a digest of its own and disks that several machines share want them."""
    contents = Contents.of([stored for source in whole for stored in source.stored], tag)
    held = {source.ours: {rank for rank, _ in holders(source.ours)} for source in whole}
    share = max(1, sum(source.bytes for source in whole) // len(set[int]().union(*held.values())))
    load: dict[int, int] = {}
    sources: dict[int, list[Source]] = {}
    stretches: list[Stretch] = []
    last, at = -1, len(contents.header)
    for group in _in_groups(_closed(whole, contents), max(1, share // 16)):
        of: dict[int, int] = {}
        for source in group:
            size = source.bytes
            of |= {rank: of.get(rank, 0) + size for rank in held[source.ours]}
        most = max(of.values())
        able = {rank for rank, size in of.items() if 4 * size >= most}
        if last not in able or load[last] >= share:
            last = min(able, key=lambda rank: (load.get(rank, 0), rank))
        size = sum(source.bytes for source in group)
        load[last] = load.get(last, 0) + size
        sources.setdefault(last, []).extend(group)
        start = stretches.pop().start if stretches and stretches[-1].rank == last else at
        at += size
        stretches.append(Stretch(last, start, at))
    return FilePlan(sources, {}, OneFile(name, contents, stretches))


def _closed(whole: Iterable[Source], contents: Contents) -> list[list[Source]]:
    """In the file's order the least that is put together at a time: what is stored of each lies between no other's.
    The experts of a layer are one such group, as its tensors follow each other expert by expert."""
    out: list[list[Source]] = []
    end = 0
    for start, stop, source in sorted(((*_span(s, contents), s) for s in whole), key=lambda one: one[:2]):
        if not out or (start >= end and source.bytes):
            out.append([])
        out[-1].append(source)
        end = max(end, stop)
    return out


def _span(source: Source, contents: Contents) -> tuple[int, int]:
    places = [contents.places[stored.name] for stored in source.stored]
    return min(start for start, _ in places), max(end for _, end in places)


def _in_groups(closed: Iterable[list[Source]], least: int) -> Iterator[list[Source]]:
    """Of at least so many bytes, but for the last."""
    group: list[Source] = []
    for some in closed:
        group = [*group, *some]
        if sum(source.bytes for source in group) >= least:
            yield group
            group = []
    if group:
        yield group


def _source(ours: str, entries: tuple[StoredTensors, ...], whole: torch.Tensor) -> Source:
    stored = [
        FileTensor(name, piece.dtype, tuple(piece.shape))
        for entry in entries
        for name, piece in zip(entry.theirs, entry.write(whole), strict=True)
    ]
    return Source(ours, entries, tuple(stored))


def _files(sources: Sequence[Source], limit: int) -> list[list[FileTensor]]:
    out: list[list[FileTensor]] = [[]]
    size = 0
    for one in (one for source in sources for one in source.stored):
        if out[-1] and size + one.bytes > limit:
            out.append([])
            size = 0
        out[-1].append(one)
        size += one.bytes
    return out


class Assembly:
    """One rank's side of writing all files of a plan."""

    def __init__(
        self, plan: FilePlan, model: ModelFiles, rank: int, wire: Wire, holders: Holders,
        part: Callable[[str], torch.Tensor], shape_of: Callable[[str], Sequence[int]],
    ) -> None:  # fmt: skip
        """part: this rank's own, of one of our tensors."""
        self.plan, self.model, self.rank, self.wire = plan, model, rank, wire
        self.holders, self.part, self.shape_of = holders, part, shape_of
        self.problems: list[Exception] = []  # of threads that send
        self.chunk = max(LEAST, CHUNK // max(1, len(plan.sources)))

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """This rank's files, while its parts go to the other writers. An error is raised after all of them are sent."""
        threads = [
            threading.Thread(target=self._send_all, args=(rank, sources), name=f"save-to-{rank}", daemon=True)
            for rank, sources in self.plan.sources.items()
            if rank != self.rank and any(self._boxes(source.ours) for source in sources)
        ]
        for thread in threads:
            thread.start()
        incoming = self._incoming()
        try:
            if self.plan.one is None:
                records = {name: self._write_one(folder / name, content, incoming) for name, content in self._mine()}
            else:
                records = self._write_into(folder, self.plan.one, incoming)
        finally:
            with suppress(CheckpointError):  # the first one is raised
                for _ in incoming:  # after an error the other ranks still send
                    pass
            for thread in threads:
                heartbeat.join(thread)
        if self.problems:  # another rank's file holds zeros: this save must fail
            raise self.problems[0]
        return records

    def _mine(self) -> Sequence[tuple[str, Sequence[FileTensor]]]:
        return self.plan.files.get(self.rank, ())

    def _write_one(self, path: Path, content: Sequence[FileTensor], incoming: Iterator[torch.Tensor]) -> FileRecord:
        entries = [(one.name, one.dtype, one.shape) for one in content]
        tensors = (tensor for _, tensor in zip(content, incoming))  # takes no tensor of the next file
        record = write_stream(path, entries, tensors, {"format": self.model.tag})
        writer.ops.sync(path)  # by who wrote it: another machine's fsync does not reach this one's memory
        return record

    def _write_into(self, folder: Path, one: OneFile, incoming: Iterator[torch.Tensor]) -> dict[str, FileRecord]:
        if self.rank not in self.plan.sources:
            return {}
        return {one.name: one.write(folder, self.rank, self._in_file_order(one.contents, incoming))}

    def _in_file_order(
        self, contents: Contents, incoming: Iterator[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's tensors with where they begin, but for those without an element: they have no place."""
        for together in _closed(self.plan.sources[self.rank], contents):
            stored = [one for source in together for one in source.stored]
            placed = [(contents.places[one.name], next(incoming)) for one in stored]
            held = ((start, tensor) for (start, end), tensor in placed if start < end)
            yield from sorted(held, key=lambda one: one[0])

    def _incoming(self) -> Iterator[torch.Tensor]:
        """What this rank stores, in order. After an error everything that is on its way is still received."""
        problem: CheckpointError | None = None
        for source in self.plan.sources.get(self.rank, ()):
            out = self._collect(source.ours)
            if problem is None:
                pieces: list[torch.Tensor] = []
                with out.noting_errors():
                    whole = out.done()
                    self.model.check(source.ours, whole)
                    pieces = [piece for entry in source.entries for piece in entry.write(whole)]
                for piece in pieces:
                    yield piece.detach().to("cpu").contiguous()
                problem = out.error
        if problem is not None:
            raise problem

    def _collect(self, name: str) -> Gathered:
        out = Gathered(name, self.shape_of(name))
        for rank, boxes in self.holders(name):
            with out.noting_errors():
                if rank == self.rank:
                    out.take(self.part(name), boxes)
                else:
                    receive_part(self.wire, rank, boxes, out, self.chunk)
        return out

    def _boxes(self, name: str) -> Sequence[Box]:
        return next((boxes for rank, boxes in self.holders(name) if rank == self.rank), ())

    def _send_all(self, rank: int, sources: Sequence[Source]) -> None:
        try:
            for source in sources:
                if boxes := self._boxes(source.ours):
                    try:
                        part = self.part(source.ours)
                        if part.dtype not in DTYPES:
                            raise CheckpointError(f"holds {source.ours} as {part.dtype}, which is not sent")
                    except Exception as error:
                        send_problem(self.wire, rank, error)
                    else:
                        send_part(self.wire, rank, part, boxes, self.chunk, self.problems)
        except CheckpointError:  # the writer is lost: the rank that waits for it reports that
            return
