"""A rank's part of tensors in safetensors files: only the bytes it holds are read, and never more in memory than those.

Called when a model is built or resumed on many ranks, whatever layout wrote the files. Plain reads, not a mapping of
the file: pages of a mapping count as this process's memory, and a cut of columns touches every one of them.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from erniekit import heartbeat
from erniekit.checkpoint.manifest import unreadable
from erniekit.checkpoint.safe import SafetensorsHeader, TensorEntry, check_safetensors
from erniekit.errors import CheckpointError
from erniekit.files.listed import Listed
from erniekit.models.names import Entry

if TYPE_CHECKING:
    from erniekit.parallel.sharding import Box

Slices = tuple[slice, ...]

CHUNK = 32 << 20  # bytes read before they are moved to their place: what reading costs besides the piece itself
_AHEAD = 1 << 20  # bytes of readahead hint before short reads, which the kernel would else fetch page by page
_NEAR = 64 << 10  # bytes between two short reads up to which that pays
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "U16": torch.bfloat16,  # older Paddle builds stored bf16 bits so
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def _close_all(files: Mapping[Path, IO[bytes]]) -> None:
    for file in files.values():
        file.close()


class TensorFiles:
    """Tensors by name in safetensors files. Headers are read once, and checked; data only on access."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self.bytes_read = 0  # of tensor data
        self._headers: dict[Path, SafetensorsHeader] = {}
        self._open: dict[Path, IO[bytes]] = {}
        weakref.finalize(self, _close_all, self._open)

    @classmethod
    def of_stem(cls, folder: Path, stem: str) -> TensorFiles:
        """`stem.safetensors`, or the shards stem-0000k-of-0000n; empty when there are none."""
        whole, listed = folder / f"{stem}.safetensors", Listed(folder)
        files = [whole] if listed.has(whole.name) else listed.glob(f"{stem}-*-of-*.safetensors")
        out = cls({})
        out._headers = {file: check_safetensors(file) for file in files}
        out.files = {name: file for file, header in out._headers.items() for name in header.tensors}
        return PiecedFiles(out) if any("|" in name for name in out.files) else out

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self._entry(name).dtype
        if stored not in DTYPES:
            raise CheckpointError(f"{name} has dtype {stored}, which cannot be trained", where=str(self.files[name]))
        return DTYPES[stored]

    def read(self, name: str, at: Slices | None = None, shape: Sequence[int] = ()) -> torch.Tensor:
        """The block `at` of a tensor, one slice with bounds for each dim; all of it when not given.

        shape: under which `at` is meant, where it is not the file's own (the same elements in the same order)."""
        entry, dtype = self._entry(name), self.dtype(name)
        shape = shape or entry.shape
        at = tuple(slice(0, n) for n in shape) if at is None else at
        out = torch.empty([s.stop - s.start for s in at], dtype=dtype)
        if out.numel():
            view = out.reshape(-1).view(torch.uint8).numpy().data
            self._fill(self.files[name], view, entry.start, byte_runs(shape, at, dtype.itemsize))
        return out

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.files:
            raise CheckpointError(f"tensor {name!r} is missing", fix="the files are incomplete; copy them again")
        file = self.files[name]
        if file not in self._headers:
            self._headers[file] = check_safetensors(file)
        if name not in self._headers[file].tensors:
            raise CheckpointError(
                f"{file.name} does not hold {name!r}, although the index lists it",
                where=str(file.parent),
                fix="the files are of different downloads; fetch them again",
            )
        return self._headers[file].tensors[name]

    def _fill(self, file: Path, view: memoryview, base: int, runs: Iterator[tuple[int, int]]) -> None:
        try:
            if file not in self._open:
                self._open[file] = file.open("rb", buffering=0)
            fd, done, hinted = self._open[file].fileno(), 0, -1
            for start, length in runs:
                offset, stop = base + start, done + length
                if length < _NEAR and stop < len(view) and offset >= hinted:
                    hinted = _read_ahead(fd, offset)
                while done < stop:
                    got = os.preadv(fd, [view[done:stop]], offset)
                    if not got:
                        raise CheckpointError(f"{file.name} ends before its tensors do", where=str(file))
                    done, offset = done + got, offset + got
        except OSError as error:
            raise unreadable(file, error) from error
        self.bytes_read += len(view)
        heartbeat.beat()


def piece_name(name: str, start: Sequence[int], whole: Sequence[int]) -> str:
    """What a block of a tensor is stored as, by the rank that held it."""
    return f"{name}|{','.join(map(str, start))}|{','.join(map(str, whole))}"


class PiecedFiles(TensorFiles):
    """Tensors whose blocks lie in the files of the ranks that held them (rank_files.py). Of a requested block,
    only what it shares with stored ones is read."""

    def __init__(self, stored: TensorFiles) -> None:
        super().__init__({})
        self._stored, self._pieces = stored, dict[str, list[tuple[str, tuple[int, ...]]]]()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for key, file in stored.files.items():
            try:
                name, start, whole = key.split("|")
                begins, shape = (tuple(int(n) for n in text.split(",") if n) for text in (start, whole))
            except ValueError:
                raise CheckpointError(f"{key!r} is not a block of a tensor", where=str(file)) from None
            if self._shapes.setdefault(name, shape) != shape or not len(begins) == len(stored.shape(key)) == len(shape):
                raise CheckpointError(f"the blocks of {name} do not fit each other", where=str(file))
            self._pieces.setdefault(name, []).append((key, begins))
        self.files = {name: stored.files[pieces[0][0]] for name, pieces in self._pieces.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(self._pieces[name][0][0])

    def read(self, name: str, at: Slices | None = None, shape: Sequence[int] = ()) -> torch.Tensor:
        assert tuple(shape) in ((), self.shape(name))
        at = tuple(slice(0, n) for n in self.shape(name)) if at is None else at
        out, found = torch.empty([s.stop - s.start for s in at], dtype=self.dtype(name)), 0
        for key, begins in self._pieces[name]:
            ends = [first + n for first, n in zip(begins, self._stored.shape(key))]
            common = [(max(s.start, a), min(s.stop, b)) for s, a, b in zip(at, begins, ends)]
            if any(a >= b for a, b in common):
                continue
            there = tuple(slice(a - first, b - first) for (a, b), first in zip(common, begins))
            here = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(common, at))
            out[here] = self._stored.read(key, there)
            found += prod(b - a for a, b in common)
        if found != out.numel():
            raise CheckpointError(
                f"the files of the ranks do not hold all of {name}", where=str(self.files[name].parent)
            )
        self.bytes_read = self._stored.bytes_read
        return out


def byte_runs(shape: Sequence[int], at: Slices, item: int) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of each unbroken stretch of a block of a row-major tensor, in the block's own order."""
    if not shape:
        yield 0, item
        return
    cut = [d for d, (n, s) in enumerate(zip(shape, at)) if s.stop - s.start != n]
    last = cut[-1] if cut else 0  # dims behind it are whole
    strides = [item * prod(shape[d + 1 :]) for d in range(len(shape))]
    length = (at[last].stop - at[last].start) * strides[last]
    for index in itertools.product(*(range(s.start, s.stop) for s in at[:last])):
        yield sum(i * stride for i, stride in zip(index, strides)) + at[last].start * strides[last], length


@torch.no_grad()
def fill_boxes(files: TensorFiles, entry: Entry, boxes: Sequence[Box], out: torch.Tensor) -> None:
    """Read straight into a rank's own tensor, on any device and in its dtype: CHUNK bytes are the only extra memory."""
    if not entry.runs:  # an entry without rows is read whole
        whole = entry.read([files.read(name) for name in entry.theirs])
        for box in boxes:
            out[box.local_slices].copy_(whole[box.global_slices])
        return
    for box in boxes:
        for name, at, here in _parts(entry, box, files):
            turned = entry.turned and len(at) == 2
            for rows in _chunks(at, files.dtype(name).itemsize):
                piece = files.read(name, (rows, *at[1:]), _seen_as(entry, len(at)))
                moved = _shifted(here[1 if turned else 0], at[0], rows)
                place = (here[0], moved) if turned else (moved, *here[1:])
                out[place].copy_(piece.t() if turned else piece)


def _parts(entry: Entry, box: Box, files: TensorFiles) -> Iterator[tuple[str, Slices, Slices]]:
    """A box cut where their tensors meet: their tensor's name, the block in its file, the block in our local tensor."""
    (rows, *rest), (here, *here_rest) = box.global_slices, box.local_slices
    first = 0
    for run in entry.runs:
        name = entry.theirs[run.source]
        shape = files.shape(name)
        turned = entry.turned and len(shape) == 2
        count = shape[1 if turned else 0] if run.count is None else run.count
        lo, hi = max(rows.start, first), min(rows.stop, first + count)
        if lo < hi:
            theirs = slice(run.start + lo - first, run.start + hi - first)
            ours = slice(here.start + lo - rows.start, here.start + hi - rows.start)
            yield name, (*rest, theirs) if turned else (theirs, *rest), (ours, *here_rest)
        first += count


def _seen_as(entry: Entry, dims: int) -> tuple[int, ...]:
    """Our shape of a tensor that is stored under another; empty when it is not."""
    if not entry.shape:
        return ()
    count = entry.runs[0].count or 0
    return (count,) if dims == 1 else (count, prod(entry.shape) // count)


def _chunks(at: Slices, item: int) -> Iterator[slice]:
    rows = at[0]
    step = max(1, CHUNK // max(1, item * prod(s.stop - s.start for s in at[1:])))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(rows.stop, start + step))


def _shifted(here: slice, whole: slice, part: slice) -> slice:
    return slice(here.start + part.start - whole.start, here.start + part.stop - whole.start)


def _read_ahead(fd: int, offset: int) -> int:
    """Read ahead a megabyte of a cut of columns: three times as fast from a cold disk. Only where the system has it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, _AHEAD, os.POSIX_FADV_WILLNEED)
    return offset + _AHEAD
