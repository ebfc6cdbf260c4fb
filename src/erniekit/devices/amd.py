"""AMD cards: a ROCm build of torch presents them as cuda (torch.version.hip is set). Described; none has run here.

An MI300 reports a capability of 9.x, which is no NVIDIA capability: kernels for Hopper must not be chosen by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from erniekit.devices import cuda_family
from erniekit.devices.base import Device, Finding
from erniekit.devices.cuda import CudaLikeDevice
from erniekit.devices.findings import NEVER_RUN, tool_finding, visible_finding

EVIDENCE = NEVER_RUN
WHEN_ABSENT = "check the driver (rocm-smi) and that torch is a ROCm build, or run with device=cpu"


class AmdDevice(CudaLikeDevice):
    vendor: ClassVar[str] = "amd"
    # MI300's fp8 is another format (fnuz) than the one weights are stored in.
    lacks: ClassVar[Mapping[str, str]] = {"fp8": "another fp8 format", **CudaLikeDevice.lacks}


def present() -> bool:
    return cuda_family.present("amd")


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    return cuda_family.make(AmdDevice)


def findings() -> list[Finding]:
    hip = torch.version.hip
    return [
        Finding(
            hip is not None,
            f"torch {torch.__version__} is {f'for ROCm {hip}' if hip else 'no ROCm build'}",
            "" if hip else "install a ROCm build of torch",
        ),
        tool_finding("rocm-smi", "the driver's tool is not on PATH"),
        visible_finding("HIP_VISIBLE_DEVICES"),
    ]
