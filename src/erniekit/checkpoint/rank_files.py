"""What one rank holds of a group of tensors, in a file of its own: all ranks write at once and none sends a tensor.

Called by gather.py. A block is stored as `name|where it begins|shape of the whole`, so that any file shows which part
of which tensor it has; slices.py reads any layout's part from any layout's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from erniekit.checkpoint import writer
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.slices import piece_name
from erniekit.checkpoint.tensor_file import readable_by_all, write_stream

if TYPE_CHECKING:
    from erniekit.parallel.sharding import Box

Part = tuple[str, Sequence["Box"], tuple[int, ...], torch.Tensor]


def file_of(stem: str, rank: int, ranks: int) -> str:
    return f"{stem}-rank-{rank:05d}-of-{ranks:05d}.safetensors"


def write_part(path: Path, parts: Sequence[Part]) -> FileRecord:
    """parts: name, the boxes of it that this rank writes, the whole's shape, and this rank's tensor. Host memory holds
    a copy of one of them at a time; the file is on disk for good when this returns."""
    entries = []
    for name, boxes, whole, tensor in parts:
        for box in boxes:
            shape = tuple(s.stop - s.start for s in box.global_slices)
            entries.append((piece_name(name, [s.start for s in box.global_slices], whole), tensor.dtype, shape))

    def blocks() -> Iterator[torch.Tensor]:
        for _, boxes, _, tensor in parts:
            for box in boxes:
                yield tensor[box.local_slices].detach().to("cpu").contiguous()

    record = write_stream(path, entries, blocks(), {"format": "pt"})
    readable_by_all(path)
    writer.ops.sync(path)  # on the machine that wrote it: another's fsync does not reach this one's memory
    return record
