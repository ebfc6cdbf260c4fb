"""Apple's GPU (torch's mps): one device a machine, no collectives of its own. Described; none has run here."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from erniekit.devices import accelerator
from erniekit.devices.accelerator import AcceleratorDevice
from erniekit.devices.base import Device, Event, Finding, HostEvent
from erniekit.devices.findings import NEVER_RUN

EVIDENCE = NEVER_RUN
WHEN_ABSENT = "mps needs macOS on Apple silicon and an arm64 build of torch; or run with device=cpu"


class AppleDevice(AcceleratorDevice):
    vendor: ClassVar[str] = "apple"
    asynchronous: ClassVar[bool] = False  # it is, but has no streams to order copies by: all work is in one queue

    def bind(self, index: int) -> None:
        return None

    def synchronise(self, handle: torch.device | None = None) -> None:
        self.module.synchronize()  # of the one there is: it takes no number

    def event(self) -> Event:
        return HostEvent()

    def stream(self) -> Any:
        raise NotImplementedError

    def allocated(self) -> int:
        return int(self._call("current_allocated_memory", 0))

    def reserved(self) -> int:
        return int(self._call("driver_allocated_memory", 0))


def present() -> bool:
    try:
        return torch.backends.mps.is_available()
    except Exception:
        return False


def count() -> int:
    return int(present())


def make() -> Device:
    total = 0
    try:
        total = int(torch.mps.recommended_max_memory())
    except Exception:  # older torch
        total = 0
    return AppleDevice(name="Apple GPU", type="mps", total_memory=total)


def findings() -> list[Finding]:
    there = present()
    built = torch.backends.mps.is_built()
    return [
        Finding(built, f"torch {torch.__version__} is built {'with' if built else 'without'} mps", WHEN_ABSENT),
        Finding(there, f"{'one' if there else 'no'} Apple GPU, {accelerator.count_of('mps')} in torch's count"),
    ]
