"""The CPU: every feature runs here, slowly and exactly. Picked when no accelerator is present or `device: cpu`."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from typing import ClassVar

from erniekit.devices.base import Device
from erniekit.host_memory import available_memory, total_memory
from erniekit.printable import counted

EVIDENCE = "runs in every test"


class CpuDevice(Device):
    vendor: ClassVar[str] = "cpu"

    def free_memory(self) -> tuple[int, int]:
        free = available_memory()
        return self.total_memory // 2 if free is None else free, self.total_memory

    def usable_memory(self, share: float) -> int:
        """Half of what is free: other processes need the host's memory too."""
        return self.free_memory()[0] // 2

    def empty_cache(self) -> None:
        """Free pages between used ones go back to the system too: malloc gives back only those at its end. glibc's."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)


def present() -> bool:
    return True


def count() -> int:
    return 1


def make() -> Device:
    # A CPU without bf16 instructions prints a C++ backtrace at the first product; the result is right.
    warnings.filterwarnings("ignore", message=r"(?s).*mkldnn_matmul")
    name = f"CPU, {counted(os.cpu_count() or 1, 'core')}"
    return CpuDevice(name=name, type="cpu", total_memory=total_memory())
