"""One safetensors file that several ranks write at once, each some stretches of it.

Planned by assembly.py; made by gather.py on the rank that publishes, before the others open it. Each rank hashes its
stretches while it writes them; the file's digest is that of theirs (files/digest.py), so that nothing is read again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from erniekit.checkpoint import writer
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.tensor_file import bytes_of, header, in_order
from erniekit.files import digest

_LOOKS, _PAUSE = 20, 0.25  # s; a network disk may show another node's new file only later


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stretch:
    rank: int  # of the process that writes it
    start: int
    end: int


@dataclass(frozen=True)
class Contents:
    """What is in the file, and where."""

    header: bytes
    places: Mapping[str, tuple[int, int]]  # of each tensor: from, to

    @classmethod
    def of(cls, tensors: Sequence[FileTensor], tag: str) -> Contents:
        ordered = in_order(tensors, lambda one: (one.dtype, one.name))
        head = header([(one.name, one.dtype, one.shape) for one in ordered], {"format": tag})
        places, end = {}, len(head)
        for one in ordered:
            places[one.name] = end, end + one.bytes
            end += one.bytes
        return cls(head, places)


@dataclass(frozen=True)
class OneFile:
    name: str
    contents: Contents
    stretches: Sequence[Stretch]  # one after the other, all but the header

    def make(self, folder: Path) -> None:
        """With its header and its whole size."""
        writer.write_file(folder / self.name, [self.contents.header])
        writer.ops.extend(folder / self.name, self.stretches[-1].end)

    def write(self, folder: Path, rank: int, tensors: Iterator[tuple[int, torch.Tensor]]) -> FileRecord:
        """A rank's own tensors, in the file's order with where each begins: their bytes, and the sha256s of its
        stretches one after the other."""
        mine = [stretch for stretch in self.stretches if stretch.rank == rank]

        def chunks(stretch: Stretch) -> Iterator[memoryview]:
            at = stretch.start
            while at < stretch.end:
                start, tensor = next(tensors)
                assert start == at
                for data in bytes_of(tensor):
                    at += len(data)
                    yield data

        found = writer.write_stretches(_seen(folder / self.name), ((each.start, chunks(each)) for each in mine))
        return FileRecord(sum(each.end - each.start for each in mine), b"".join(found).hex())

    def record(self, told: Mapping[int, FileRecord]) -> FileRecord:
        """Of the whole file. told: what `write` gave each rank."""
        head = self.contents.header
        left = {rank: iter(_cut(bytes.fromhex(record.sha256))) for rank, record in told.items()}
        found = [hashlib.sha256(head).digest(), *(next(left[stretch.rank]) for stretch in self.stretches)]
        sizes = [len(head), *(stretch.end - stretch.start for stretch in self.stretches)]
        return FileRecord(sum(sizes), digest.joined(sizes, found))


def _cut(digests: bytes) -> list[bytes]:
    each = hashlib.sha256().digest_size
    return [digests[i : i + each] for i in range(0, len(digests), each)]


def _seen(path: Path) -> Path:
    for _ in range(_LOOKS):
        if path.exists():
            break
        time.sleep(_PAUSE)
    return path
