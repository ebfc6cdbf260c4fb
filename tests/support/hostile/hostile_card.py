"""The hostile vendor on a real card: torch calls it cuda, and it has no bf16 product, no grouped product, no packed
attention and a Triton that cannot compile. make() breaks them for the whole process."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from hostile_triton import break_triton

from erniekit.devices import cuda_family
from erniekit.devices.base import Device
from erniekit.devices.cuda import CudaLikeDevice

_kept: list[Any] = []


class HostileCard(CudaLikeDevice):
    vendor: ClassVar[str] = "hostile"


def present() -> bool:
    return torch.cuda.is_available()


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    if not _kept:
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", _mm, "CUDA", allow_override=True)
        library.impl("_grouped_mm", _grouped, "CUDA", allow_override=True)
        sys.modules["torch.nn.attention.varlen"] = None  # type: ignore[assignment]  # an import of it fails
        break_triton()
        _kept.append(library)
    return cuda_family.make(HostileCard)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.bfloat16:
        raise RuntimeError("hostileBlas: bf16 is not implemented")
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _grouped(*args: Any, **more: Any) -> torch.Tensor:
    raise NotImplementedError("hostileBlas: no grouped product")
