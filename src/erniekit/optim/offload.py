"""Where optimiser states live between updates: on the device, or in host memory (offload_optim). Used by adamw.py.

States are moved, never changed, so every number is the same; what changes is the device memory left for activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from erniekit.devices.base import Device, Event

LEAVING = 1 << 30  # bytes that may be on their way to the host: their memory on the device is free when they are there
BLOCK = 256 << 20  # bytes pinned at once; torch rounds each pinned block up to a power of two, so small ones waste
_ALIGN = 512  # bytes


class OnDevice:
    """States stay on their parameters' device: nothing is moved. Also what a test or another place derives from."""

    one_by_one = False  # update one parameter at a time, so that the states of few are on the device
    ahead = 0  # parameters whose states are expected while one is updated

    def room(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory, with nothing in it yet, where a state of a parameter on `device` is kept."""
        return torch.empty(*shape, dtype=dtype, device=device)

    def expect(self, kept: Iterable[torch.Tensor]) -> None:
        """These will be fetched soon: a place that can starts to bring them."""

    def fetch(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A state for an update; not a copy where it is kept there already."""
        return kept

    def store(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        """What an update made of a fetched state, back to where it is kept."""

    def settle(self) -> None:
        """Before the host reads or writes what is kept: until all that was stored has arrived."""


class InHost(OnDevice):
    """States are in host memory, pinned where the device's copies gain by it, and come to the device for the update:
    all together, or one parameter's at a time (tensorwise_offload_optimizer). States of parameters in host memory are
    there already and stay."""

    def __init__(self, device: Device, one_by_one: bool = False) -> None:
        self.device, self.one_by_one = device, one_by_one
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
            self.device.synchronise(device)
        self._busy.clear()

    def _pinned(self, size: int) -> torch.Tensor:
        """Bytes cut from a block that is never given back: states live as long as the run."""
        taken = -(-size // _ALIGN) * _ALIGN
        fits = (i for i, spare in enumerate(self._spare) if len(spare) >= taken)
        at = next(fits, None)
        if at is None:
            size_of_block = max(BLOCK, 1 << (taken - 1).bit_length())
            block = torch.empty(size_of_block, dtype=torch.uint8, pin_memory=self.device.pins_memory)
        else:
            block = self._spare.pop(at)
        if len(block) - taken >= _ALIGN:
            self._spare.append(block[taken:])
        return block[:size]


class Streamed(InHost):
    """As InHost, on a device with streams: while one parameter is updated, the states of those after it arrive on one
    stream and those of the one before leave on another. So the states of a few parameters are on the device at once,
    never all of them, and copies cost no time while there is as much to compute."""

    def __init__(self, device: Device, ahead: int) -> None:
        super().__init__(device, one_by_one=True)
        self.ahead = ahead
        self._arriving, self._leaving = device.stream(), device.stream()
        self._coming: dict[int, tuple[torch.Tensor, Event]] = {}  # id of a kept state -> its copy, and when it is there
        self._left: set[int] = set()  # ids of states that were stored, and may still be on their way
        self._sent: deque[tuple[Event, int]] = deque()  # when each of those will be there, and its bytes
        self._sent_bytes = 0

    def expect(self, kept: Iterable[torch.Tensor]) -> None:
        for state in kept:
            if id(state) in self._coming:
                continue
            self._wait_for_room()
            if id(state) in self._left:  # the next step has come to it: all that left in the last one has arrived
                self._arriving.wait_stream(self._leaving)
                self._left.clear()
            arrived = self.device.event()
            with self.device.on_stream(self._arriving):
                here = self._brought(state)
                arrived.record()
            self._coming[id(state)] = here, arrived

    def _wait_for_room(self) -> None:
        """The host is far ahead of the copies: without waiting, all states would be given memory at once."""
        while self._sent_bytes > LEAVING:
            sent, size = self._sent.popleft()
            sent.synchronize()
            self._sent_bytes -= size

    def _brought(self, state: torch.Tensor) -> torch.Tensor:
        return state.to(self.device.handle, non_blocking=True)

    def _send(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        kept.copy_(value, non_blocking=True)

    def fetch(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.expect((kept,))
        now = self.device.current_stream()
        here, arrived = self._coming.pop(id(kept))
        now.wait_event(arrived)  # and not for those that were expected after it
        self.device.record_stream(here, now)
        return here

    def store(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        if value is kept:
            return
        self._leaving.wait_stream(self.device.current_stream())
        with self.device.on_stream(self._leaving):
            self._send(value, kept)
            sent = self.device.event()
            sent.record()
        self._sent.append((sent, value.nbytes))
        self._sent_bytes += value.nbytes
        self.device.record_stream(value, self._leaving)
        self._left.add(id(kept))
        self._busy.add(value.device)

    def settle(self) -> None:
        """And what was expected is forgotten: the host may write to it now."""
        self._coming.clear()
        self.device.synchronise()
        self._busy.clear()
        self._left.clear()
        self._sent.clear()
        self._sent_bytes = 0


AHEAD = {False: 4, True: 1}  # parameters whose states are on their way: offload_optim, tensorwise_offload_optimizer


def states_home(offload: bool, one_by_one: bool, device: Device) -> OnDevice:
    """From the two keys offload_optim and tensorwise_offload_optimizer; the second is enough."""
    if not offload and not one_by_one:
        return OnDevice()
    if device.asynchronous and device.pins_memory:
        return Streamed(device, AHEAD[one_by_one])
    return InHost(device, one_by_one)
