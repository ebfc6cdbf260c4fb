"""Activation checkpointing: forget what a layer computed, and compute it again in backward. Called by apply.py.

full = whole decoder layers, full_attn = their attention block, core_attn (or selective) = only the weightless
inner attention. What is computed again starts from its inputs; those may be kept in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from erniekit.devices.base import Device, Event
from erniekit.model_contract import spread, wrap

IN_FLIGHT = 2  # inputs on their way to the host: one layer computes while the one before it is copied


def apply_recompute(
    model: nn.Module, granularity: str, skip_layers: Collection[int] = (), inputs: HostInputs | None = None
) -> int:
    """Wraps each layer of `model.layers` but those skipped; returns how many. With `full`, blocks in front of them as
    well. inputs: where those are kept meanwhile (offload_recompute_inputs), one for all parts of a model; None leaves
    them on the device."""
    wrapped = 0
    if granularity == "full":
        recompute_blocks(spread(model).front())
    for i, layer in spread(model).held_layers():
        if i in skip_layers:
            continue
        owner, method = {
            "full": (layer, "forward"),
            "full_attn": (layer, "attend"),
            "core_attn": (layer.attn.inner, "forward"),
            "selective": (layer.attn.inner, "forward"),
        }[granularity]
        wrap(owner, lambda plain: _again(plain, inputs), method)
        if owner is layer.attn.inner:
            owner.with_positions = False
        wrapped += 1
    return wrapped


def recompute_blocks(blocks: Iterable[nn.Module]) -> None:
    """Each of these by itself: the experts of a layer (use_recompute_moe), layers that predict further tokens."""
    for block in blocks:
        wrap(block, lambda plain: _again(plain, None))


def _again(function: Callable[..., Any], inputs: HostInputs | None) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False)

    def run_from_host(*args: Any) -> Any:
        # checkpoint saves its tensor arguments under these hooks, and all else under its own.
        with saved_tensors_hooks(inputs.pack, inputs.unpack):  # type: ignore[union-attr]
            return run(*args)

    return run if inputs is None else run_from_host


class HostInputs:
    """Tensors of the device kept in host memory from forward to backward. Where it has streams the copies run parallel
    to the computation; a tensor is freed once its copy has ended, so that no more than IN_FLIGHT of them take device
    memory. What is in host memory already stays."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._copies = device.stream() if device.asynchronous else None
        self._leaving: deque[tuple[Event, torch.Tensor]] = deque()

    def pack(self, tensor: torch.Tensor) -> Any:
        here = self.device.handle.type
        if tensor.device.type != here or (here == "cpu" and self._copies is None):
            return tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=self.device.pins_memory)
        if self._copies is None:
            return kept.copy_(tensor.detach()), tensor.device, None
        now = self.device.current_stream()
        self._let_go(now, IN_FLIGHT - 1)
        self._copies.wait_stream(now)
        done = self.device.event()
        with self.device.on_stream(self._copies):
            kept.copy_(tensor.detach(), non_blocking=True)
            done.record()
        self._leaving.append((done, tensor.detach()))
        return kept, tensor.device, done

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        kept, device, done = packed
        if done is not None:
            now = self.device.current_stream()
            self._let_go(now, 0)
            now.wait_event(done)
        result: torch.Tensor = kept.to(device, non_blocking=True)
        return result

    def _let_go(self, now: Any, left: int) -> None:
        """Memory given back is taken again by work on `now`, which therefore first waits for the copy out of it."""
        while len(self._leaving) > left:
            done, _ = self._leaving.popleft()
            now.wait_event(done)
