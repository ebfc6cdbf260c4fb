"""One NVIDIA card. TF32 stays off: fp32 means fp32 (ERNIEKit's launcher sets the same)."""

from __future__ import annotations

import os

import torch

from erniekit.devices.base import Device

GIB = 1024**3
# Dense bf16 tensor-core rates from the vendors' data sheets, FLOP/s, by a word in the card's name.
BF16_PEAK = {
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


class CudaDevice(Device):
    def memory(self) -> dict[str, float]:
        return {
            "current_memory_allocated": torch.cuda.memory_allocated() / GIB,
            "current_memory_reserved": torch.cuda.memory_reserved() / GIB,
            "max_memory_allocated": torch.cuda.max_memory_allocated() / GIB,
            "max_memory_reserved": torch.cuda.max_memory_reserved() / GIB,
        }

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def same_bits(self) -> None:
        # Without it torch refuses products: with workspace where it likes, cuBLAS may add up in another order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it

    def rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


def present() -> bool:
    return torch.cuda.is_available()


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
