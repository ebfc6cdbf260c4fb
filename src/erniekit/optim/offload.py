"""Where optimiser states live between updates: on the device, or in host memory (offload_optim). Used by adamw.py.

States are moved, never changed, so every number is the same; what changes is the device memory left for activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

BLOCK = 256 << 20  # bytes pinned at once; torch rounds each pinned block up to a power of two, so small ones waste
_ALIGN = 512  # bytes


class OnDevice:
    """States stay beside their parameters: nothing is moved. Also what a test or another place derives from."""

    one_by_one = False  # update one parameter at a time, so that the states of no more than one are on the device

    def room(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory, with nothing in it yet, where a state of a parameter on `device` is kept."""
        return torch.empty(*shape, dtype=dtype, device=device)

    def fetch(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A state for an update; not a copy where it is kept there already."""
        return kept

    def store(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        """What an update made of a fetched state, back to where it is kept."""

    def settle(self) -> None:
        """Before the host reads or writes what is kept: until all that was stored has arrived."""


class InHost(OnDevice):
    """States are in pinned host memory and come to the device for the update: all together, or one parameter's at a
    time (tensorwise_offload_optimizer). States of parameters in host memory are there already and stay."""

    def __init__(self, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self._spare: list[torch.Tensor] = []  # unused ends of pinned blocks
        self._busy: set[torch.device] = set()  # that copies to the host were started on

    def room(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if device.type == "cpu":
            return super().room(shape, device, dtype)
        return self._pinned(dtype.itemsize * prod(shape)).view(dtype).view(*shape)

    def fetch(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        return kept.to(device, non_blocking=True)

    def store(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        # On the stream of the update, and so is the next fetch: they stay in order without a wait.
        if value is not kept:
            kept.copy_(value, non_blocking=True)
            self._busy.add(value.device)

    def settle(self) -> None:
        for device in self._busy:
            torch.accelerator.synchronize(device)
        self._busy.clear()

    def _pinned(self, size: int) -> torch.Tensor:
        """Bytes cut from a block that is never given back: states live as long as the run."""
        taken = -(-size // _ALIGN) * _ALIGN
        fits = (i for i, spare in enumerate(self._spare) if len(spare) >= taken)
        at = next(fits, None)
        if at is None:
            block = torch.empty(max(BLOCK, 1 << (taken - 1).bit_length()), dtype=torch.uint8, pin_memory=True)
        else:
            block = self._spare.pop(at)
        if len(block) - taken >= _ALIGN:
            self._spare.append(block[taken:])
        return block[:size]


def states_home(offload: bool, one_by_one: bool) -> OnDevice:
    """From the two keys offload_optim and tensorwise_offload_optimizer; the second alone is enough."""
    return InHost(one_by_one) if offload or one_by_one else OnDevice()
