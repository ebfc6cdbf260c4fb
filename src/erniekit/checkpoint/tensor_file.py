"""One safetensors file, written straight from the tensors' memory and hashed on the way (writer.write_file).

Used by shards.py, assembly.py, one_file.py and rank_files.py. The library's own writer hashes nothing, so that every
byte had to be read again for the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from erniekit.checkpoint import writer
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.slices import DTYPES
from erniekit.errors import CheckpointError

T = TypeVar("T")
HeaderEntry = tuple[str, torch.dtype, tuple[int, ...]]
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "U16"}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """A new file of contiguous tensors in host memory, which must stay as they are meanwhile."""
    names = in_order(tensors, lambda name: (tensors[name].dtype, name))
    entries = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names]
    return write_stream(path, entries, (tensors[name] for name in names), metadata)


def in_order(items: Iterable[T], of: Callable[[T], tuple[torch.dtype, str]]) -> list[T]:
    """As the library has them: the widest first, so that every tensor begins at a multiple of its element. of: dtype
    and name."""

    def key(item: T) -> tuple[int, str]:
        dtype, name = of(item)
        return -dtype.itemsize, name

    return sorted(items, key=key)


def write_stream(
    path: Path, entries: Sequence[HeaderEntry], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> FileRecord:
    """A new file of tensors that come one after the other, in the order of their entries."""
    return writer.write_file(path, _contents(entries, tensors, metadata))


def _contents(
    entries: Sequence[HeaderEntry], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    yield memoryview(header(entries, metadata))
    for (name, dtype, shape), tensor in zip(entries, tensors, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        yield from bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Of one in host memory, contiguous; of none there is no view."""
    if tensor.numel():
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Of tensors that follow each other in this order."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in entries:
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors files of ours do not hold")
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
