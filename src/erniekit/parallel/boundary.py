"""Boundary: how hidden states and their gradients get from one pipeline rank to another. Made by apply.py.

`send` and `receive` start a transfer and return at once; transfers between two ranks end in the order in which both
ends started them. Callers keep to pipeline_schedule.py's order, in which nothing hangs where starting means waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from erniekit.devices.base import Device
from erniekit.parallel import comm
from erniekit.parallel.mesh import World

MOST_SENT = 8  # tensors under way, whose memory is held


class Arriving(Protocol):
    def wait(self) -> torch.Tensor:
        """The tensor on the device, once it is there."""
        ...


class Boundary(Protocol):
    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """rank: of the pipeline, here and below."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Arriving: ...

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What `rank` has, on every rank; of one shape and dtype everywhere."""
        ...

    def finish(self) -> None:
        """Returns when everything that was sent has been received: at the end of a step."""
        ...


class _Sent:
    """Transfers under way, with the memory they read."""

    def __init__(self) -> None:
        self.works: deque[tuple[Any, torch.Tensor]] = deque()

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        while self.works and (len(self.works) >= MOST_SENT or self.works[0][0].is_completed()):
            self.works.popleft()[0].wait()
        self.works.append((work, tensor))

    def finish(self) -> None:
        while self.works:
            self.works.popleft()[0].wait()


class _Received:
    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self.work, self.tensor = work, tensor

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.tensor


class DirectBoundary:
    """Ranks of one kind of device: point-to-point calls of its own collective library, one tensor at a time."""

    def __init__(self, group: ProcessGroup, device: torch.device, first: int = 0) -> None:
        """first: the pipeline rank that is the group's first."""
        self.group, self.device, self.first, self.sent = group, device, first, _Sent()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        tensor = tensor.contiguous()
        self.sent.add(comm.isend(tensor, rank - self.first, self.group), tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Arriving:
        room = torch.empty(shape, dtype=dtype, device=self.device)
        return _Received(comm.irecv(room, rank - self.first, self.group), room)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        comm.broadcast(tensor, rank - self.first, self.group)
        return tensor

    def finish(self) -> None:
        self.sent.finish()


class HostBoundary:
    """Ranks on unlike devices: bytes copied to the host, sent over gloo, copied to the device there.

    Raw bytes, so that no side depends on the other's number formats; pinned memory where the device has it."""

    def __init__(self, group: ProcessGroup, device: Device) -> None:
        self.group, self.device, self.sent = group, device, _Sent()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        raw = _bytes(self._to_host(tensor))
        self.sent.add(comm.isend(raw, rank, self.group), raw)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Arriving:
        room = torch.empty(shape, dtype=dtype, pin_memory=self.device.pins_memory)
        work = comm.irecv(_bytes(room), rank, self.group)
        return _OnHost(work, room, self.device)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        room = self._to_host(tensor)
        comm.broadcast(_bytes(room), rank, self.group)
        return room.to(self.device.handle)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.pins_memory)
        room.copy_(tensor, non_blocking=self.device.pins_memory)
        copied = self.device.event()
        copied.record()
        copied.synchronize()  # gloo reads it from another thread
        return room

    def finish(self) -> None:
        self.sent.finish()


class IslandBoundary:
    """A pipeline over islands of unlike devices: direct inside one, through the host between them."""

    def __init__(self, interconnects: Sequence[str], here: int, direct: Boundary | None, host: Boundary) -> None:
        """interconnects: of each pipeline rank; direct: None where this one is its island's only."""
        self.interconnects, self.here, self.direct, self.host = list(interconnects), here, direct, host

    def _to(self, rank: int) -> Boundary:
        inside = self.direct is not None and self.interconnects[rank] == self.interconnects[self.here]
        return self.direct if inside and self.direct is not None else self.host

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._to(rank).send(tensor, rank)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Arriving:
        return self._to(rank).receive(shape, dtype, rank)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return self.host.broadcast(tensor, rank)

    def finish(self) -> None:
        for each in (self.direct, self.host):
            if each is not None:
                each.finish()


def boundary_of(world: World, device: Device, group: ProcessGroup) -> Boundary:
    """group: this rank's pipeline. All ranks must call it."""
    if world.islands is None:
        return DirectBoundary(group, device.handle)
    interconnects = world.islands.stage_interconnects(world.layout)
    here = world.at["pp"]
    near = world.island_group()
    direct = DirectBoundary(near, device.handle, interconnects.index(interconnects[here])) if near is not None else None
    return IslandBoundary(interconnects, here, direct, HostBoundary(group, device))


class _OnHost:
    def __init__(self, work: Any, room: torch.Tensor, device: Device) -> None:
        self.work, self.room, self.device = work, room, device

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.room.to(self.device.handle, non_blocking=self.device.pins_memory)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
