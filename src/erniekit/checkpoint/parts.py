"""A tensor on its way between ranks: in messages of bounded size, put together from its parts.

Used by gather.py and assembly.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch

from erniekit.errors import CheckpointError

if TYPE_CHECKING:
    from erniekit.checkpoint.wire import Wire
    from erniekit.parallel.sharding import Box

CHUNK = 32 << 20  # bytes a message: what sending and receiving cost in memory besides the tensor itself
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def send_part(
    wire: Wire,
    rank: int,
    part: torch.Tensor,
    boxes: Sequence[Box],
    chunk: int = 0,
    problems: list[Exception] | None = None,
) -> None:
    """problems: where a device that fails in the middle is noted; zeros follow then, so that the other side does not
    wait, and the caller sees to it that nothing of them is kept. Without it the error is raised."""
    failed = False
    wire.send_numbers(rank, 0, DTYPES.index(part.dtype))
    for block in blocks_of(boxes, part.element_size(), chunk):
        data: torch.Tensor | None = None
        try:
            data = None if failed else part[block.local_slices].to("cpu").contiguous()
        except Exception as error:
            if problems is None:
                raise
            problems.append(error)
            failed = True
        if data is None:
            data = torch.zeros([s.stop - s.start for s in block.global_slices], dtype=part.dtype)
        wire.send(rank, as_bytes(data))


def send_problem(wire: Wire, rank: int, error: Exception) -> None:
    """Instead of a part: whatever it is, the other side must not wait for it."""
    what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    data = torch.frombuffer(bytearray(what.encode() or b"?"), dtype=torch.uint8)
    wire.send_numbers(rank, data.numel(), 0)
    wire.send(rank, data)


def receive_part(wire: Wire, rank: int, boxes: Sequence[Box], out: Gathered, chunk: int = 0) -> None:
    status, code = wire.receive_numbers(rank, 2)
    if status:
        text = bytes(wire.receive(rank, torch.empty(status, dtype=torch.uint8)).tolist())
        raise CheckpointError(f"rank {rank}: {text.decode()}")
    whole = out.room(DTYPES[code])
    for block in blocks_of(boxes, whole.element_size(), chunk):
        target = whole[block.global_slices]
        if target.is_contiguous():
            wire.receive(rank, as_bytes(target))
        else:
            piece = torch.empty_like(target, memory_format=torch.contiguous_format)
            wire.receive(rank, as_bytes(piece))
            target.copy_(piece)
    out.agree(DTYPES[code], rank)


class Gathered:
    """A tensor on its way: its parts, and the first thing that went wrong with them."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name, self.shape = name, tuple(shape)
        self.whole: torch.Tensor | None = None
        self.error: CheckpointError | None = None

    def take(self, part: torch.Tensor, boxes: Sequence[Box]) -> None:
        """Our own part. Where it is all there is, no copy is made."""
        if tuple(part.shape) == self.shape and [box.global_slices for box in boxes] == [_all(self.shape)]:
            self.whole = part.to("cpu")
            return
        whole = self.room(part.dtype)
        for box in boxes:
            whole[box.global_slices].copy_(part[box.local_slices])
        self.agree(part.dtype, None)

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer for parts; one of another dtype gets a buffer of its own, to be refused."""
        if self.whole is None:
            self.whole = torch.empty(self.shape, dtype=dtype)
        return self.whole if self.whole.dtype == dtype else torch.empty(self.shape, dtype=dtype)

    def agree(self, dtype: torch.dtype, rank: int | None) -> None:
        assert self.whole is not None
        if self.whole.dtype != dtype:
            raise CheckpointError(f"{self.name} is {self.whole.dtype} on one rank and {dtype} on rank {rank}")

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.error = self.error or error
        except Exception as error:  # of a check or a layout: the other ranks still send, and must be received
            self.error = self.error or CheckpointError(f"{self.name}: {type(error).__name__}: {error}")

    def done(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if self.whole is None:
            raise CheckpointError(f"no rank holds {self.name}")
        return self.whole


def blocks_of(boxes: Sequence[Box], item: int, chunk: int = 0) -> Iterator[Box]:
    """Boxes in messages of about `chunk` bytes (0: CHUNK), cut along rows; the same on both sides."""
    for box in boxes:
        (rows, *rest), (here, *here_rest) = box.global_slices, box.local_slices
        step = max(1, (chunk or CHUNK) // max(1, item * prod(s.stop - s.start for s in rest)))
        for start in range(rows.start, rows.stop, step):
            stop, first = min(rows.stop, start + step), here.start + start - rows.start
            yield type(box)((slice(start, stop), *rest), (slice(first, first + stop - start), *here_rest))


def _all(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
