"""One safetensors file that several ranks write into at once, each the tensors it puts together.

Planned by assembly.py, made and sealed by gather.py on the rank that publishes. A file's sha256 takes its bytes in order,
which no rank has: each hashes its own tensors while it writes them, and whoever seals the file reads it once, for its
sha256, and finds in each stretch what its writer hashed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from erniekit import heartbeat
from erniekit.checkpoint import writer
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.tensor_file import bytes_of, header, in_order

_READ = 4 << 20  # bytes
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
class OneFile:
    name: str
    header: bytes
    tensors: Sequence[FileTensor]  # as they follow each other
    starts: Mapping[str, int]  # of each in the file

    @classmethod
    def of(cls, name: str, tensors: Sequence[FileTensor], tag: str) -> OneFile:
        ordered = in_order(tensors, lambda one: (one.dtype, one.name))
        head = header([(one.name, one.dtype, one.shape) for one in ordered], {"format": tag})
        starts, end = {}, len(head)
        for one in ordered:
            starts[one.name], end = end, end + one.bytes
        return cls(name, head, ordered, starts)

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(one.bytes for one in self.tensors)

    def make(self, folder: Path) -> None:
        """With its header and its whole size, before any rank writes into it."""
        writer.write_file(folder / self.name, [self.header])
        writer.ops.extend(folder / self.name, self.bytes)

    def write(self, folder: Path, tensors: Iterable[tuple[FileTensor, torch.Tensor]]) -> FileRecord:
        """Bytes of the tensors, and a digest of theirs in the file's order."""
        path = _seen(folder / self.name)
        size = 0

        def ranges() -> Iterator[tuple[int, memoryview]]:
            nonlocal size
            for one, tensor in tensors:
                assert (tensor.dtype, tuple(tensor.shape)) == (one.dtype, one.shape), one.name
                for data in bytes_of(tensor):
                    size += len(data)
                    yield self.starts[one.name], data

        digests = writer.write_ranges(path, ranges())
        return FileRecord(size, _joined(digests[start] for start in sorted(digests)))

    def seal(self, folder: Path, writers: Mapping[str, int], told: Mapping[int, FileRecord]) -> FileRecord | None:
        """The file's record, for the manifest; None: it does not read as it was written. writers: who wrote each
        tensor; told: what each says of its own."""
        whole, found, size = hashlib.sha256(), dict[int, list[bytes]](), 0
        with (folder / self.name).open("rb", buffering=0) as file, ThreadPoolExecutor(1, "checkpoint-hash") as other:
            for one in (None, *self.tensors):
                own, left = hashlib.sha256(), one.bytes if one is not None else len(self.header)
                size += left
                while left and (block := file.read(min(left, _READ))):
                    both = other.submit(whole.update, block)
                    own.update(block)
                    both.result()
                    left -= len(block)
                    heartbeat.beat()
                if one is not None and one.bytes:
                    found.setdefault(writers[one.name], []).append(own.digest())
        # The header is the same for all of them, and was written here.
        if {rank: _joined(digests) for rank, digests in found.items()} != {r: t.sha256 for r, t in told.items()}:
            return None
        return FileRecord(size, whole.hexdigest())


def _joined(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _seen(path: Path) -> Path:
    for _ in range(_LOOKS):
        if path.exists():
            break
        time.sleep(_PAUSE)
    return path
