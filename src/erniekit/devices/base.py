"""Device: what the rest of the house needs to know of the hardware. One per file beside this; listed in __init__.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Device:
    name: str  # for people: "NVIDIA H200"
    type: str  # torch's word: cuda, cpu
    total_memory: int  # bytes
    peak_flops: dict[torch.dtype, float] = field(default_factory=dict)  # dense, per second; empty = unknown

    @property
    def handle(self) -> torch.device:
        return torch.device(self.type)

    def memory(self) -> dict[str, float]:
        """GiB in ERNIEKit's metric names; empty where the runtime does not count."""
        return {}

    def reset_peak(self) -> None:
        return None

    def synchronise(self) -> None:
        return None

    def same_bits(self) -> None:
        """From now on the same computation gives the same bits; where it always does, nothing is to be done."""

    def rng_state(self) -> torch.Tensor | None:
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        return None
