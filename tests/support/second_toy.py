"""A second vendor beside toy_device.py: it computes on the CPU too, and shares no collective library with the first."""

from __future__ import annotations

from typing import ClassVar

import torch

from erniekit.devices.base import GIB, Device


class SecondToy(Device):
    vendor: ClassVar[str] = "second"


def present() -> bool:
    return True


def count() -> int:
    return 2


def make() -> Device:
    return SecondToy("Second toy", "cpu", 4 * GIB, {torch.float32: 5e11})
