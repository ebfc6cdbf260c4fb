"""One NVIDIA card. TF32 stays off: fp32 means fp32 (ERNIEKit's launcher sets the same)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from erniekit.devices.base import Device, Event

# Dense bf16 tensor-core rates from the vendors' data sheets, FLOP/s, by a word in the card's name.
BF16_PEAK = {
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
WHEN_ABSENT = "check the driver (nvidia-smi), or run with device=cpu"


class CudaDevice(Device):
    vendor: ClassVar[str] = "gpu"
    backend: ClassVar[str] = "cpu:gloo,cuda:nccl"
    asynchronous: ClassVar[bool] = True
    pins_memory: ClassVar[bool] = True
    counts_memory: ClassVar[bool] = True
    fast_bf16: ClassVar[bool] = True
    triton: ClassVar[bool] = True
    records_graphs: ClassVar[bool] = True
    scales_in_loss: ClassVar[bool] = True

    def bind(self, index: int) -> None:
        torch.cuda.set_device(index)

    def capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability()

    def smi_id(self) -> str | None:
        """The card's unique name: its number here need not be its number there (CUDA_VISIBLE_DEVICES)."""
        unique = str(getattr(torch.cuda.get_device_properties(self.handle), "uuid", ""))
        return f"GPU-{unique}" if unique else None

    def synchronise(self, handle: torch.device | None = None) -> None:
        torch.cuda.synchronize(handle)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.handle)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.handle)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def graphed(self, module: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Any:
        return torch.cuda.make_graphed_callables(module, inputs)

    def free_memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def same_bits(self) -> None:
        # Without it torch refuses products: with workspace where it likes, cuBLAS may add up in another order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is never read

    def rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


def present() -> bool:
    return torch.cuda.is_available()


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    properties = torch.cuda.get_device_properties(0)
    peak = next((rate for word, rate in BF16_PEAK.items() if word in properties.name), None)
    return CudaDevice(
        name=properties.name,
        type="cuda",
        total_memory=properties.total_memory,
        peak_flops={torch.bfloat16: peak} if peak else {},
    )
