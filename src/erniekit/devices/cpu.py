"""The CPU: every feature runs here, slowly and exactly. Picked when no accelerator is present or `device: cpu`."""

from __future__ import annotations

import os
import warnings

from erniekit.devices.base import Device


def make() -> Device:
    # A CPU without bf16 instructions says so with a C++ backtrace at the first product; the result is right.
    warnings.filterwarnings("ignore", message=r"(?s).*mkldnn_matmul")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Device(name=f"CPU, {os.cpu_count()} cores", type="cpu", total_memory=memory)


def present() -> bool:
    return True
