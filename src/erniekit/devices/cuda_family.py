"""Whose card it is that torch calls cuda: five vendors' builds of torch do. And the Device made of one.

The order is from the surest mark to the weakest: the build's own mark, the card's name, a vendor's tool, which only
shows that its driver is installed. NVIDIA's is what no other vendor has marked: others' platforms carry an nvidia-smi.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from erniekit.devices.base import Device

AnyDevice = TypeVar("AnyDevice", bound=Device)

NAME_MARKS = {
    "iluvatar": ("iluvatar", "ix bi", "bi-v"),
    "metax": ("metax", "mxc"),
    "kunlunxin": ("kunlun", "p800", "xpu"),
}
# Not rocm-smi: a HIP build has its own mark.
PACKAGES = {"kunlunxin": "torch_xmlir"}
TOOLS = {"iluvatar": "ixsmi", "metax": "mx-smi", "kunlunxin": "xpu-smi"}


def maker() -> str:
    """The vendor of torch's cuda device; never raises, and opens no card where it need not."""
    if torch.version.hip is not None:
        return "amd"
    build = torch.__version__.lower()
    if getattr(torch, "corex", False) or "corex" in build:
        return "iluvatar"
    if "metax" in build or "maca" in build:
        return "metax"
    for vendor, package in PACKAGES.items():
        if find_spec(package) is not None:
            return vendor
    name = _name()
    for vendor, marks in NAME_MARKS.items():
        if any(mark in name for mark in marks):
            return vendor
    if "nvidia" in name or not name:
        return "nvidia"
    return next((vendor for vendor, tool in TOOLS.items() if shutil.which(tool)), "nvidia")


def _name() -> str:
    with suppress(Exception):  # a driver that is too old raises here; the device's own file has the fix
        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(0).name.lower()
    return ""


def present(vendor: str, plugin: str = "") -> bool:
    """Whether torch's cuda device is this vendor's; plugin: imported first, if it is there."""
    if plugin and find_spec(plugin) is not None:
        with suppress(Exception):  # an SDK that is not set up; `findings` reports it
            __import__(plugin)
    try:
        return bool(torch.cuda.is_available()) and maker() == vendor
    except Exception:  # a vendor's shim without its driver raises whatever it likes
        return False


def make(kind: type[AnyDevice], peaks: Mapping[str, float] | None = None) -> AnyDevice:
    """peaks: dense bf16 FLOP/s by a part of the card's name."""
    with suppress(Exception):  # NVIDIA's own switches; another vendor's build may have none
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    properties: Any = torch.cuda.get_device_properties(0)
    peak = next((rate for part, rate in (peaks or {}).items() if part in properties.name), None)
    return kind(
        name=properties.name,
        type="cuda",
        total_memory=properties.total_memory,
        peak_flops={torch.bfloat16: peak} if peak else {},
    )
