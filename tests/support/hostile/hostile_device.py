"""A vendor's device that claims much and has little, as a plug-in of another package: this file, and its name in
ERNIEKIT_DEVICES. It says cuda, computes on the CPU, and really has no bf16 product and no grouped product: make() puts
operators in their place that raise, where every caller in the process meets them. Its Triton cannot compile a
kernel. Graphs and packed attention are claimed and not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hostile_triton import break_triton

from erniekit.capabilities import CAPABILITIES
from erniekit.devices.base import GIB, Device

_kept: list[Any] = []  # operators live as long as the library that brought them


class HostileDevice(Device):
    vendor: ClassVar[str] = "hostile"
    fast_bf16: ClassVar[bool] = True
    triton: ClassVar[bool] = True
    records_graphs: ClassVar[bool] = True

    @property
    def handle(self) -> torch.device:
        return torch.device("cpu")

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(name for name in CAPABILITIES if name != "nvidia")

    def graphed(self, module: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Any:
        return lambda *given: module(*inputs) + 1  # replays, and computes something else


def present() -> bool:
    return True


def count() -> int:
    return 1


def make() -> Device:
    if not _kept:
        _break_products()
        break_triton()
    return HostileDevice("Hostile 9000", "cuda", 8 * GIB)


def _break_products() -> None:
    library = torch.library.Library("aten", "IMPL")

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.bfloat16:
            raise RuntimeError("hostileBlas: bf16 is not implemented")
        return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))

    def grouped(*args: Any, **more: Any) -> torch.Tensor:
        raise NotImplementedError("hostileBlas: no grouped product")

    library.impl("mm", mm, "CPU", allow_override=True)
    if hasattr(torch.ops.aten, "_grouped_mm"):
        library.impl("_grouped_mm", grouped, "CPU", allow_override=True)
    _kept.append(library)
