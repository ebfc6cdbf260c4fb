"""A CPU that claims to record steps, for the code around a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.devices.cpu import CpuDevice


class RecordingCpu(CpuDevice):
    """Recording does the work once, as a card's warm-up does, and replaying does it again."""

    triton, records_graphs = True, True

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def recording_cpu() -> RecordingCpu:
    return RecordingCpu("a recording CPU", "cpu", 1 << 30)


@dataclass
class Room:
    """Memory for one recording, which counts what recordings took and how many found too little."""

    size: float = float("inf")  # bytes
    taken: list[int] = field(default_factory=list)  # of each recording, in order
    faults: int = 0


class _Counted(TorchDispatchMode):
    """Bytes of all tensors that are made inside; beyond `room` there are none."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self.room, self.bytes = room, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.bytes += made.nbytes
        if self.bytes > self.room.size:
            self.room.faults += 1
            raise torch.OutOfMemoryError(f"CPU out of memory. Tried to allocate {self.bytes} bytes.")
        return made


@dataclass(frozen=True)
class SmallCpu(RecordingCpu):
    """Recording raises torch.OutOfMemoryError in the midst of work whose tensors need more than the room there is."""

    room: Room = field(default_factory=Room)

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        with _Counted(self.room) as counted:
            work()
        self.room.taken.append(counted.bytes)
        return work


def small_cpu(size: float = float("inf")) -> SmallCpu:
    return SmallCpu("a recording CPU", "cpu", 1 << 30, room=Room(size))
