"""A device through torch's common module interface (torch.npu, torch.xpu, torch.mps, torch.musa): what NPUs, XPUs and
unknown accelerators share. Every call is guarded: a module that lacks a function gives what a CPU would.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import torch

from erniekit.devices.base import Device, Event, HostEvent

AnyDevice = TypeVar("AnyDevice", bound="AcceleratorDevice")


def module_of(kind: str, plugin: str = "") -> Any:
    """torch.<kind>, with the plug-in that brings it imported; None where there is none or its runtime is not set up."""
    try:
        if plugin and find_spec(plugin) is not None:
            __import__(plugin)
        return getattr(torch, kind, None)
    except Exception:  # a wheel without its vendor's libraries raises ImportError, OSError, RuntimeError
        return None


def is_there(kind: str, plugin: str = "") -> bool:
    module = module_of(kind, plugin)
    try:
        return module is not None and bool(module.is_available())
    except Exception:
        return False


class AcceleratorDevice(Device):
    asynchronous: ClassVar[bool] = True
    fast_bf16: ClassVar[bool] = True  # a claim: tried
    lacks: ClassVar[Mapping[str, str]] = {
        "triton": "ours are written for cards that torch calls cuda",
        "graphs": "only recorded on cards that torch calls cuda",
        "fp8": "not known to be there",
        "nvidia": "not an NVIDIA card",
    }
    quiet_lacks: ClassVar[frozenset[str]] = frozenset({"graphs", "fp8", "nvidia"})

    @property
    def module(self) -> Any:
        return getattr(torch, self.type)

    def _call(self, name: str, otherwise: Any, *args: Any) -> Any:
        with suppress(Exception):  # an allocator that does not count asserts, an old plug-in has no such function
            return getattr(self.module, name)(*args)
        return otherwise

    def bind(self, index: int) -> None:
        self.module.set_device(index)

    def synchronise(self, handle: torch.device | None = None) -> None:
        if handle is None or handle.index is None:
            self.module.synchronize()
        else:
            self.module.synchronize(handle)

    def event(self) -> Event:
        made: Event | None = None
        with suppress(Exception):
            made = self.module.Event(enable_timing=True)
        return made or HostEvent()

    def stream(self) -> Any:
        return self.module.Stream()

    def current_stream(self) -> Any:
        return self.module.current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def free_memory(self) -> tuple[int, int]:
        free, total = self._call("mem_get_info", (self.total_memory, self.total_memory))
        return int(free), int(total)

    def allocated(self) -> int:
        return int(self._call("memory_allocated", 0))

    def reserved(self) -> int:
        return int(self._call("memory_reserved", 0))

    def peak_allocated(self) -> int:
        return int(self._call("max_memory_allocated", 0))

    def peak_reserved(self) -> int:
        return int(self._call("max_memory_reserved", 0))

    def reset_peak(self) -> None:
        self._call("reset_peak_memory_stats", None)

    def empty_cache(self) -> None:
        self._call("empty_cache", None)

    def same_bits(self) -> None:
        torch.use_deterministic_algorithms(True)

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor | None = self._call("get_rng_state", None)
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._call("set_rng_state", None, state)


def make(made: type[AnyDevice], kind: str, label: str) -> AnyDevice:
    """The first device of that kind, as its module describes it."""
    module, properties = getattr(torch, kind), None
    with suppress(Exception):
        properties = module.get_device_properties(0)
    name = str(getattr(properties, "name", "") or label)
    total = int(getattr(properties, "total_memory", 0) or 0)
    if not total:
        with suppress(Exception):
            total = int(module.mem_get_info()[1])
    return made(name=name, type=kind, total_memory=total)


def count_of(kind: str, plugin: str = "") -> int:
    module = module_of(kind, plugin)
    try:
        return int(module.device_count()) if module is not None else 0
    except Exception:
        return 0
