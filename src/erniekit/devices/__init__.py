"""DEVICES: ERNIEKit's words for hardware -> the file that drives it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from erniekit.errors import DeviceError, LaterError

if TYPE_CHECKING:
    from erniekit.devices.base import Device

DEVICES = {"gpu": "erniekit.devices.cuda", "cpu": "erniekit.devices.cpu"}
LATER = ("npu", "xpu", "iluvatar_gpu", "metax_gpu")


def pick(word: str = "auto", no_cuda: bool = False) -> Device:
    """The device for a `device` value. `auto` takes the accelerator that is here, else the CPU."""
    if word in LATER:
        raise LaterError(f"device {word!r} is not in this version", where="device", fix="use gpu or cpu")
    if no_cuda or word == "cpu":
        return import_module(DEVICES["cpu"]).make()
    gpu = import_module(DEVICES["gpu"])
    if gpu.present():
        return gpu.make()
    if word == "gpu":
        raise DeviceError(
            "device 'gpu' was asked for and torch finds none here",
            where="device",
            fix="check the driver (nvidia-smi), or run with device=cpu",
        )
    return import_module(DEVICES["cpu"]).make()
