"""Copies of a rank's tensors in host memory, for saves in the background. Used by collective.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from erniekit import heartbeat

if TYPE_CHECKING:
    from erniekit.devices.base import Device


class HostCopies:
    """Copies of a rank's tensors in host memory, so that training may go on changing them. Buffers are kept and reused:
    fresh memory costs several times the copy itself, and pinned memory much more."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Not before the reader of the last ones is done. All copies are started, then waited for together."""
        out, devices = {}, set()
        for name, tensor in tensors.items():
            source = plain(tensor)
            old = self._buffers.get(name)
            there = self.device.asynchronous and source.device.type == self.device.type
            if old is None or old.shape != source.shape or old.dtype != source.dtype:
                old = torch.empty(source.shape, dtype=source.dtype, pin_memory=there and self.device.pins_memory)
            out[name] = old.copy_(source, non_blocking=True)
            heartbeat.beat()
            devices |= {source.device} if there else set()
        for device in devices:
            self.device.synchronise(device)
        self._buffers = out
        return dict(out)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank itself holds: a DTensor's local part."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
