"""Iluvatar CoreX cards (BI-V100, BI-V150): the vendor's build of torch presents them as cuda.

Described from the vendor's public recipes (DeepSparkHub) and ERNIEKit's guide; none has run here. A 64 GB card is two
devices of 32 GB. The collective library has NCCL's interface and not its protocol: no group spans both vendors' cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from erniekit.devices import cuda_family
from erniekit.devices.base import Device, Finding
from erniekit.devices.cuda import CudaLikeDevice
from erniekit.devices.findings import NEVER_RUN, sdk_finding, tool_finding, visible_finding

EVIDENCE = NEVER_RUN
WHEN_ABSENT = "check the driver (ixsmi) and that torch is the vendor's build (+corex), or run with device=cpu"


class IluvatarDevice(CudaLikeDevice):
    vendor: ClassVar[str] = "iluvatar"
    lacks: ClassVar[Mapping[str, str]] = {
        "fp8": "no public recipe for these cards uses it",
        **CudaLikeDevice.lacks,
    }


def present() -> bool:
    return cuda_family.present("iluvatar")


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    return cuda_family.make(IluvatarDevice)


def findings() -> list[Finding]:
    vendor_build = getattr(torch, "corex", False) or "corex" in torch.__version__
    return [
        tool_finding("ixsmi", "the driver's tool is not on PATH"),
        sdk_finding("/usr/local/corex", "install the vendor's SDK (CoreX)"),
        Finding(
            bool(vendor_build),
            f"torch {torch.__version__} is {'the' if vendor_build else 'not the'} vendor's build",
            "" if vendor_build else "install the vendor's wheel (+corex), then this package with pip install --no-deps",
        ),
        visible_finding("CUDA_VISIBLE_DEVICES"),
    ]
