"""A vendor's device that claims much and has little, as a plug-in of another package: this file, and its name in
ERNIEKIT_DEVICES. It says cuda, computes on the CPU, and really has no bf16 product and no grouped product: make() puts
operators in their place that raise, where every caller in the process meets them. Its Triton cannot compile a
kernel. Graphs and packed attention are claimed and not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hostile_products import break_products
from hostile_triton import break_triton

from erniekit.capabilities import CAPABILITIES
from erniekit.devices.base import GIB, Device


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

    def graphed(self, module: Callable[..., Any], inputs: tuple[torch.Tensor, ...], memory: Any = None) -> Any:
        return lambda *given: module(*inputs) + 1  # replays, and computes something else

    def graph_memory(self) -> Any:
        return None

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("hostileGraph: not implemented")

    def free_memory(self) -> tuple[int, int]:
        return 4 * GIB, 8 * GIB


def present() -> bool:
    return True


def count() -> int:
    return 1


def make() -> Device:
    break_products("CPU")
    break_triton()
    return HostileDevice("Hostile 9000", "cuda", 8 * GIB)
