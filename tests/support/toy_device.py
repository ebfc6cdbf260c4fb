"""A kind of device that another package brings: this file, and its name in ERNIEKIT_DEVICES. It computes on the CPU and
has streams, events and memory figures of its own; what is asked of it is written to the file TOY_CALLS names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from erniekit.devices.base import GIB, Device


class ToyEvent:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.monotonic()
        _note("record")

    def synchronize(self) -> None:
        _note("synchronize")

    def elapsed_time(self, end_event: ToyEvent) -> float:
        return (end_event.at - self.at) * 1e3


class ToyStream:
    def wait_stream(self, other: ToyStream) -> None:
        _note("wait_stream")

    def wait_event(self, event: ToyEvent) -> None:
        _note("wait_event")


class ToyDevice(Device):
    vendor: ClassVar[str] = "toy"
    asynchronous: ClassVar[bool] = True
    counts_memory: ClassVar[bool] = True

    def bind(self, index: int) -> None:
        _note(f"bind {index}")

    def synchronise(self, handle: torch.device | None = None) -> None:
        _note("synchronise")

    def event(self) -> ToyEvent:
        return ToyEvent()

    def stream(self) -> ToyStream:
        _note("stream")
        return ToyStream()

    def current_stream(self) -> ToyStream:
        return ToyStream()

    @contextmanager
    def on_stream(self, stream: ToyStream) -> Iterator[None]:
        _note("on_stream")
        yield

    def record_stream(self, tensor: torch.Tensor, stream: ToyStream) -> None:
        _note("record_stream")

    def free_memory(self) -> tuple[int, int]:
        return 6 * GIB, 8 * GIB

    def allocated(self) -> int:
        return 2 * GIB

    def reserved(self) -> int:
        return 3 * GIB

    def peak_allocated(self) -> int:
        return 4 * GIB

    def peak_reserved(self) -> int:
        return 5 * GIB

    def reset_peak(self) -> None:
        _note("reset_peak")


def present() -> bool:
    return "TOY_ABSENT" not in os.environ


def count() -> int:
    return 2


def make() -> Device:
    return ToyDevice("Toy", "cpu", 8 * GIB, {torch.float32: 1e12})


def _note(call: str) -> None:
    if file := os.environ.get("TOY_CALLS"):
        with open(file, "a") as out:
            out.write(call + "\n")
