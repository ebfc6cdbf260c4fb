"""Moore Threads cards through torch_musa. Described; none has run here."""

from __future__ import annotations

from typing import ClassVar

from erniekit.devices import accelerator
from erniekit.devices.accelerator import AcceleratorDevice
from erniekit.devices.base import Device, Finding
from erniekit.devices.findings import NEVER_RUN, package_version, tool_finding, visible_finding

PLUGIN = "torch_musa"
EVIDENCE = NEVER_RUN
WHEN_ABSENT = "check the driver (mthreads-gmi) and that torch_musa imports, or run with device=cpu"


class MooreThreadsDevice(AcceleratorDevice):
    vendor: ClassVar[str] = "moore_threads"
    backend: ClassVar[str] = "cpu:gloo,musa:mccl"
    pins_memory: ClassVar[bool] = True
    counts_memory: ClassVar[bool] = True


def present() -> bool:
    return accelerator.is_there("musa", PLUGIN)


def count() -> int:
    return accelerator.count_of("musa", PLUGIN)


def make() -> Device:
    return accelerator.make(MooreThreadsDevice, "musa", "Moore Threads GPU")


def findings() -> list[Finding]:
    wheel = package_version("torch-musa")
    return [
        tool_finding("mthreads-gmi", "the driver's tool is not on PATH"),
        Finding(
            wheel is not None,
            f"torch_musa {wheel}" if wheel else "torch_musa is not installed",
            "" if wheel else "install the vendor's torch and torch_musa: no registry has them",
        ),
        visible_finding("MUSA_VISIBLE_DEVICES"),
    ]
