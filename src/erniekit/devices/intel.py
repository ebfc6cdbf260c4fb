"""Intel GPUs through torch's own xpu build. Described; none has run here."""

from __future__ import annotations

from typing import ClassVar

import torch

from erniekit.devices import accelerator
from erniekit.devices.accelerator import AcceleratorDevice
from erniekit.devices.base import Device, Finding
from erniekit.devices.findings import NEVER_RUN, visible_finding

EVIDENCE = NEVER_RUN
WHEN_ABSENT = "check the driver (xpu-smi discovery) and that torch is an xpu build, or run with device=cpu"


class IntelDevice(AcceleratorDevice):
    vendor: ClassVar[str] = "intel"
    backend: ClassVar[str] = "cpu:gloo,xpu:xccl"
    pins_memory: ClassVar[bool] = True
    counts_memory: ClassVar[bool] = True


def present() -> bool:
    return accelerator.is_there("xpu")


def count() -> int:
    return accelerator.count_of("xpu")


def make() -> Device:
    return accelerator.make(IntelDevice, "xpu", "Intel GPU")


def findings() -> list[Finding]:
    there = present()
    return [
        Finding(there, f"torch {torch.__version__} sees {count()} Intel GPUs", "" if there else WHEN_ABSENT),
        visible_finding("ZE_AFFINITY_MASK"),
    ]
