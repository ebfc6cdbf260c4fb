"""What one rank holds of a group of tensors, in files of its own: all ranks write at once and none sends a tensor.

Called by gather.py. A block is stored as `name|where it begins|shape of the whole`, so that any file shows which part
of which tensor it has; slices.py reads any layout's part from any layout's files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from erniekit import heartbeat
from erniekit.checkpoint import writer
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.slices import piece_name
from erniekit.checkpoint.tensor_file import write_stream

if TYPE_CHECKING:
    from erniekit.parallel.sharding import Box

Part = tuple[str, Sequence["Box"], tuple[int, ...], torch.Tensor]


TWO_FROM = 128 << 20  # bytes of a rank from which it writes two files


def file_of(stem: str, rank: int, ranks: int, number: int = 0) -> str:
    more = f"-part-{number + 1}" if number else ""
    return f"{stem}-rank-{rank:05d}-of-{ranks:05d}{more}.safetensors"


def write_parts(folder: Path, stem: str, rank: int, ranks: int, parts: Sequence[Part]) -> dict[str, FileRecord]:
    """In one file, or, where it is much, in two at once: a file is hashed by one core, and fast disks outrun that."""
    whole = {file_of(stem, rank, ranks, k): half for k, half in enumerate(_halves(parts))}
    (first, mine), *rest = whole.items()
    records, threads = dict[str, FileRecord](), list[int]()
    with ThreadPoolExecutor(1, "rank-file", lambda: threads.append(threading.get_ident())) as other:
        works = {name: other.submit(write_part, folder / name, half) for name, half in rest}
        try:
            records[first] = write_part(folder / first, mine)
        finally:  # where that failed, too, what the other still writes is progress
            for name, work in works.items():
                records[name] = heartbeat.awaited(work, threads)
    return records


def _halves(parts: Sequence[Part]) -> list[Sequence[Part]]:
    """Cut where half of the bytes lie before; in one where they are few, or of one tensor."""
    upto = list(accumulate(_bytes(part) for part in parts))
    if upto[-1] < TWO_FROM or len(parts) < 2:
        return [parts]
    cut = min(range(1, len(parts)), key=lambda k: abs(2 * upto[k - 1] - upto[-1]))
    return [parts[:cut], parts[cut:]]


def _bytes(part: Part) -> int:
    _, boxes, _, tensor = part
    return sum(prod(s.stop - s.start for s in box.global_slices) for box in boxes) * tensor.element_size()


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
    writer.ops.sync(path)  # on the machine that wrote it: another's fsync does not reach this one's memory
    return record
