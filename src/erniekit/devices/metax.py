"""MetaX cards (C500 and later): the vendor's build of torch presents them as cuda. Described; none has run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from erniekit.devices import cuda_family
from erniekit.devices.base import Device, Finding
from erniekit.devices.cuda import CudaLikeDevice
from erniekit.devices.findings import NEVER_RUN, sdk_finding, tool_finding

EVIDENCE = NEVER_RUN
WHEN_ABSENT = "check the driver (mx-smi) and that torch is the vendor's build, or run with device=cpu"


class MetaxDevice(CudaLikeDevice):
    vendor: ClassVar[str] = "metax"
    lacks: ClassVar[Mapping[str, str]] = {"fp8": "not known to be there", **CudaLikeDevice.lacks}


def present() -> bool:
    return cuda_family.present("metax")


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    return cuda_family.make(MetaxDevice)


def findings() -> list[Finding]:
    return [
        tool_finding("mx-smi", "the driver's tool is not on PATH"),
        sdk_finding("/opt/maca", "install the vendor's SDK (MACA)"),
    ]
