"""Whole tensors from the parts that ranks hold: one at a time, to the one rank that writes, over a gloo group.

Used by collective.py and nodes.py. The writer requests tensors and the other ranks reply, so that no rank
waits for one that failed: it reports the error, its connection closes, or the time-out passes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from erniekit import heartbeat
from erniekit.checkpoint.blocks import local_shape, param_of, stored_boxes, stored_shape
from erniekit.errors import CheckpointError
from erniekit.parallel import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from erniekit.devices.base import Device
    from erniekit.parallel.sharding import Box, Sharding

CHUNK = 32 << 20  # bytes a message: what sending and receiving cost in memory beside the tensor itself
TIMEOUT = 1800.0  # seconds of silence; a dead process is noticed at once, this is for a network that lost it
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
# The writer's words: answer with your part of tensor i; that was all, n bytes of JSON follow; I am at work, wait on.
_SEND, _END, _WAIT = 1, 2, 3
WAIT_S = 1.0  # between two words to wait on, more where there are very many to tell: well below any hang limit

Local = Callable[[str], torch.Tensor | None]


class Exchange:
    """One gathering. On the writer: `fetch` in any order, then `end`. On all others: `serve` until it ends."""

    def __init__(
        self,
        names: Sequence[str],
        local: Local,
        sharding: Sharding,
        rank: int,
        group: ProcessGroup | None,
        writer: int = 0,
        timeout: float = TIMEOUT,
    ) -> None:
        """group: gloo, over all ranks, used by nothing else meanwhile; None for a process that is alone."""
        self.names, self.local, self.sharding = list(names), local, sharding
        self.rank, self.writer = rank, writer
        self.wire = Wire(group, timeout)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._others = [r for r in range(comm.size_of(group) if group else 1) if r != rank]
        self._talking = threading.Lock()  # one conversation at a time: its messages follow each other

    # --- the writer ---

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around all the writer does before `end`: however long it hashes and syncs without asking other ranks, those
        hear of it well before their time-out. A thread of its own tells them, as one call may take that long; a writer
        that hangs is its own watchdog's business."""
        done = threading.Event()
        thread = threading.Thread(target=self._tell_to_wait, args=(done,), name="save-keep-alive", daemon=True)
        if self._others:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self._others:
                thread.join()

    def _tell_to_wait(self, done: threading.Event) -> None:
        every = min(max(WAIT_S, len(self._others) / 50), self.wire.timeout / 4)
        while not done.wait(every):
            for rank in self._others:
                with self._talking, suppress(CheckpointError):  # it is dead: `fetch` and `end` find out, too
                    if rank not in self.wire.lost and not done.is_set():
                        self.wire.send_numbers(rank, _WAIT, 0)

    def fetch(self, name: str) -> torch.Tensor:
        """The whole tensor in host memory, bits and dtype as held; not a copy where this rank holds all of it."""
        with self._talking:
            return self._fetch(name)

    def _fetch(self, name: str) -> torch.Tensor:
        out = _Assembled(name, stored_shape(self.sharding, name))
        asked = []
        # Whatever fails, the answers of the ranks that were asked are on their way and must be received.
        for rank, boxes in self._holders(name):
            with out.noting_errors():
                if rank != self.rank:
                    self.wire.send_numbers(rank, _SEND, self._index[name])
                asked.append((rank, boxes))
        for rank, boxes in asked:
            with out.noting_errors():
                if rank == self.rank:
                    out.take(self._part(name), boxes)
                else:
                    self._receive(rank, boxes, out)
        return out.done()

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Tell every rank that can still be told. With a `what` it is an error to them."""
        for rank in self._others:
            if rank not in self.wire.lost:
                try:
                    self.wire.send_json(rank, outcome, _END)
                except CheckpointError:  # it is dead or dying and will not miss the news
                    continue

    def _receive(self, rank: int, boxes: Sequence[Box], out: _Assembled) -> None:
        status, code = self.wire.receive_numbers(rank, 2)
        if status:
            text = bytes(self.wire.receive(rank, torch.empty(status, dtype=torch.uint8)).tolist())
            raise CheckpointError(f"rank {rank}: {text.decode()}")
        whole = out.room(_DTYPES[code])
        for block in _blocks(boxes, whole.element_size()):
            target = whole[block.global_slices]
            if target.is_contiguous():
                self.wire.receive(rank, _as_bytes(target))
            else:
                piece = torch.empty_like(target, memory_format=torch.contiguous_format)
                self.wire.receive(rank, _as_bytes(piece))
                target.copy_(piece)
        out.agree(_DTYPES[code], rank)

    # --- everyone else ---

    def serve(self) -> dict[str, Any]:
        """Send what is asked for; returns what the writer ended with, raises when that is an error."""
        while True:
            word, number = self.wire.receive_numbers(self.writer, 2)
            if word == _WAIT:
                continue
            if word == _SEND:
                self._answer(self.names[number])
                continue
            outcome = self.wire.receive_json(self.writer, number)
            if "what" in outcome:
                raise CheckpointError(**outcome)
            return outcome

    def _answer(self, name: str) -> None:
        boxes = next(boxes for rank, boxes in self._holders(name) if rank == self.rank)
        try:
            part = self._part(name)
            code = _DTYPES.index(part.dtype)
        except Exception as error:  # whatever it is, the writer must not wait for it
            what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            data = torch.frombuffer(bytearray(what.encode() or b"?"), dtype=torch.uint8)
            self.wire.send_numbers(self.writer, data.numel(), 0)
            self.wire.send(self.writer, data)
            return
        self.wire.send_numbers(self.writer, 0, code)
        for block in _blocks(boxes, part.element_size()):
            self.wire.send(self.writer, _as_bytes(part[block.local_slices].to("cpu").contiguous()))

    # --- both ---

    def _holders(self, name: str) -> list[tuple[int, tuple[Box, ...]]]:
        return [(rank, stored_boxes(boxes, name)) for rank, boxes in self.sharding.holders(param_of(name))]

    @torch.no_grad()
    def _part(self, name: str) -> torch.Tensor:
        part = self.local(name)
        if part is None:
            raise CheckpointError(f"has nothing of {name}, which the layout gives it a part of")
        part = plain(part)
        wanted = local_shape(self.sharding, name, self.rank)
        if tuple(part.shape) != tuple(wanted):
            raise CheckpointError(f"holds {name} as {tuple(part.shape)}; the layout says {tuple(wanted)}")
        return part


class _Assembled:
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
        """Where parts go; one of another dtype is received beside it, to be refused."""
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

    def done(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if self.whole is None:
            raise CheckpointError(f"no rank holds {self.name}")
        return self.whole


class Wire:
    """Bytes between two ranks of a gloo group, with a time-out and errors a person can read."""

    def __init__(self, group: ProcessGroup | None, timeout: float = TIMEOUT) -> None:
        self.group, self.timeout = group, timeout
        self.lost: set[int] = set()  # ranks that failed to answer once; gloo closes the connection then

    def send(self, rank: int, data: torch.Tensor) -> None:
        if data.numel():
            self._finish(rank, comm.isend, data)

    def receive(self, rank: int, room: torch.Tensor) -> torch.Tensor:
        if room.numel():
            self._finish(rank, comm.irecv, room)
        return room

    def send_numbers(self, rank: int, *numbers: int) -> None:
        self.send(rank, torch.tensor(numbers))

    def receive_numbers(self, rank: int, count: int) -> list[int]:
        return self.receive(rank, torch.zeros(count, dtype=torch.int64)).tolist()

    def send_json(self, rank: int, value: Any, word: int = 0) -> None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.send_numbers(rank, word, data.numel())
        self.send(rank, data)

    def receive_json(self, rank: int, size: int | None = None) -> Any:
        """size: when its announcement was received already."""
        size = self.receive_numbers(rank, 2)[1] if size is None else size
        return json.loads(self.receive(rank, torch.zeros(size, dtype=torch.uint8)).numpy().tobytes())

    @contextmanager
    def sending(self, rank: int, data: torch.Tensor) -> Iterator[None]:
        """Send while the block runs."""
        with self._readable(rank):
            work = comm.isend(data, rank, self.group)
        try:
            yield
        finally:
            with self._readable(rank):
                work.wait(timedelta(seconds=self.timeout))

    def _finish(self, rank: int, start: Callable[..., Any], data: torch.Tensor) -> None:
        with self._readable(rank):
            start(data, rank, self.group).wait(timedelta(seconds=self.timeout))
        heartbeat.beat()

    @contextmanager
    def _readable(self, rank: int) -> Iterator[None]:
        try:
            if rank in self.lost:
                raise RuntimeError("the connection was lost before")
            yield
        except RuntimeError as error:
            self.lost.add(rank)
            reason = f"did not answer within {self.timeout:g} s" if "Timed out" in str(error) else "is gone"
            raise CheckpointError(
                f"rank {rank} {reason}",
                where=str(error).splitlines()[0],
                fix=f"look at the log of rank {rank}",
            ) from error


class HostCopies:
    """Copies of a rank's tensors in host memory, so that training may go on changing them. Buffers are kept and reused:
    fresh memory costs several times the copy itself, and pinned memory much more."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Not before the reader of the last ones is done. All copies are started, then waited for together."""
        out, devices = {}, set()
        for name, tensor in tensors.items():
            source = plain(tensor)
            old = self._buffers.get(name)
            there = self.device.asynchronous and source.device.type == self.device.type
            if old is None or old.shape != source.shape or old.dtype != source.dtype:
                old = torch.empty(source.shape, dtype=source.dtype, pin_memory=there and self.device.pins_memory)
            out[name] = old.copy_(source, non_blocking=True)
            heartbeat.beat()
            devices |= {source.device} if there else set()
        for device in devices:
            self.device.synchronise(device)
        self._buffers = out
        return dict(out)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank itself holds: a DTensor's local part."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _blocks(boxes: Sequence[Box], item: int) -> Iterator[Box]:
    """Boxes in messages of about CHUNK bytes, cut along rows; the same on both sides."""
    for box in boxes:
        (rows, *rest), (here, *here_rest) = box.global_slices, box.local_slices
        step = max(1, CHUNK // max(1, item * prod(s.stop - s.start for s in rest)))
        for start in range(rows.start, rows.stop, step):
            stop, first = min(rows.stop, start + step), here.start + start - rows.start
            yield type(box)((slice(start, stop), *rest), (slice(first, first + stop - start), *here_rest))


def _all(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
