"""A device that does its work as late as it may: what a stream was not waited for is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from erniekit.devices.base import Device


class LazyStream:
    """Work is kept until somebody waits for it, as late as a device may do it: what was not waited for is not there."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self, upto: int | None = None) -> None:
        done, self.work = self.work[:upto], self.work[len(self.work) if upto is None else upto :]
        for each in done:
            each()

    def wait_stream(self, other: LazyStream) -> None:
        if other is not self:
            end = len(other.work)
            self.add(lambda: other.run(end))

    def wait_event(self, event: LazyEvent) -> None:
        self.add(event.synchronize)

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)


class LazyEvent:
    def __init__(self, device: LazyDevice) -> None:
        self.device, self.happened = device, False

    def record(self) -> None:
        self.stream = self.device.now
        self.stream.add(self._happen)

    def _happen(self) -> None:
        self.happened = True

    def synchronize(self) -> None:
        while not self.happened:
            self.stream.run(1)

    def elapsed_time(self, end_event: LazyEvent) -> float:
        return 0.0


class LazyDevice(Device):
    """The stream that computes is eager: what it waits for is done at that moment."""

    asynchronous: ClassVar[bool] = True
    pins_memory: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__("lazy", "cpu", 0)
        object.__setattr__(self, "computing", EagerStream())
        object.__setattr__(self, "now", self.computing)
        object.__setattr__(self, "streams", [])

    def event(self) -> LazyEvent:
        return LazyEvent(self)

    def stream(self) -> LazyStream:
        self.streams.append(LazyStream())
        return self.streams[-1]

    def current_stream(self) -> LazyStream:
        return self.now

    @contextmanager
    def on_stream(self, stream: LazyStream) -> Iterator[None]:
        before = self.now
        object.__setattr__(self, "now", stream)
        yield
        object.__setattr__(self, "now", before)

    def record_stream(self, tensor: torch.Tensor, stream: LazyStream) -> None:
        return None

    def synchronise(self, handle: torch.device | None = None) -> None:
        for stream in self.streams:
            stream.run()


class EagerStream(LazyStream):
    def add(self, work: Callable[[], None]) -> None:
        work()
