"""Device tables for a kernel launch over many tensors: their addresses, and which program handles which part. Used by
kernels/adamw.py and kernels/lean_adamw.py.

Cached under the caller's keys, and copied to the device again only when they changed.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class LaunchTables:
    def __init__(self) -> None:
        self._sent: dict[Any, tuple[Any, torch.Tensor]] = {}

    def kinds(self) -> set[Any]:
        """Of launch that were prepared so far: the second part of the keys that have one."""
        return {key[1] for key in self._sent if isinstance(key, tuple)}

    def one(self, device: torch.device) -> torch.Tensor:
        if device not in self._sent:
            self._sent[device] = (None, torch.ones((), device=device))
        return self._sent[device][1]

    def table(self, key: Any, values: list[Any], device: torch.device) -> torch.Tensor:
        """int64 on the device; the host does not wait for the copy."""
        sent = self._sent.get(key)
        if sent is None or sent[0] != values:
            sent = self._sent[key] = (values, _send(torch.tensor(values, dtype=torch.int64), device))
        return sent[1]

    def chunks(self, key: Any, lengths: list[int], size: int, device: torch.device) -> torch.Tensor:
        """int32 [programs, 2]: the tensor, and which of its chunks of `size` elements."""
        sent = self._sent.get(key)
        if sent is None or sent[0] != lengths:
            counts = -(-torch.tensor(lengths) // size)
            tensor = torch.repeat_interleave(torch.arange(len(lengths)), counts)
            place = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
            sent = self._sent[key] = (lengths, _send(torch.stack((tensor, place), 1).to(torch.int32), device))
        return sent[1]


def log_of(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8,
    }[dtype]  # fmt: skip


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
