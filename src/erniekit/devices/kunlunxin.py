"""Kunlunxin XPU (P800): torch_xmlir presents it as cuda and has to be imported before torch's first call of it.

Described from public code (vLLM-Kunlun, FlagCX); none has run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from erniekit.devices import cuda_family
from erniekit.devices.base import Device, Finding
from erniekit.devices.cuda import CudaLikeDevice
from erniekit.devices.findings import NEVER_RUN, package_version, tool_finding, visible_finding

PLUGIN = "torch_xmlir"
EVIDENCE = NEVER_RUN
WHEN_ABSENT = "check the driver (xpu-smi) and that torch_xmlir imports, or run with device=cpu"


class KunlunxinDevice(CudaLikeDevice):
    vendor: ClassVar[str] = "kunlunxin"
    triton: ClassVar[bool] = False
    records_graphs: ClassVar[bool] = False
    lacks: ClassVar[Mapping[str, str]] = {
        "triton": "nothing public says that ours run",
        "fp8": "nothing public says that it is there",
        "graphs": "the vendor's own graphs are another thing",
        **CudaLikeDevice.lacks,
    }
    quiet_lacks: ClassVar[frozenset[str]] = frozenset({"fp8", "graphs", "nvidia"})


def present() -> bool:
    return cuda_family.present("kunlunxin", PLUGIN)


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    return cuda_family.make(KunlunxinDevice)


def findings() -> list[Finding]:
    there = package_version(PLUGIN) or package_version("torch-xmlir")
    return [
        tool_finding("xpu-smi", "the driver's tool is not on PATH (Intel's has the same name)"),
        Finding(
            there is not None,
            f"{PLUGIN} {there}" if there else f"{PLUGIN} is not installed",
            "" if there else "work in the vendor's image: no registry has the package",
        ),
        visible_finding("XPU_VISIBLE_DEVICES"),
    ]
