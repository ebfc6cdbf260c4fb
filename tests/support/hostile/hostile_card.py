"""The hostile vendor on a real card: torch calls it cuda, and it has no bf16 product, no grouped product, no packed
attention and a Triton that cannot compile. make() breaks them for the whole process."""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
from hostile_products import break_products
from hostile_triton import break_triton

from erniekit.devices import cuda_family
from erniekit.devices.base import Device
from erniekit.devices.cuda import CudaLikeDevice


class HostileCard(CudaLikeDevice):
    vendor: ClassVar[str] = "hostile"


def present() -> bool:
    return torch.cuda.is_available()


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    break_products("CUDA")
    sys.modules["torch.nn.attention.varlen"] = None  # type: ignore[assignment]  # an import of it fails
    break_triton()
    return cuda_family.make(HostileCard)
