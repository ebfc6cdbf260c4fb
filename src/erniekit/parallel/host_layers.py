"""Frozen packed weights of some layers in host memory, brought to the device ahead of use. Called by apply.py.

The device has two buffers that take turns: while a layer computes from one, the weights of the next are copied into the
other at the same time. Such layers are computed again in the backward pass, so that nothing in a buffer is needed
any more once another layer's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from erniekit.devices.base import Device
from erniekit.model_contract import packed_layers, spread, wrap
from erniekit.parallel.packed_bytes import PackedTensor, after, seen_in

BLOCK = 1 << 26  # bytes of host memory at a time: torch pins powers of two, whatever the request


class HostLayers:
    """The layers `numbers` of one part of a model. Their `forward` is wrapped at once; `take` moves a layer's weights
    to the host as soon as all of them are packed, so that the device never holds more than one such layer."""

    def __init__(self, part: nn.Module, numbers: Collection[int], device: Device) -> None:
        self.device = device
        self.layers: dict[int, Any] = {n: layer for n, layer in spread(part).held_layers() if n in numbers}
        self.order = sorted(self.layers)
        self.tensors: dict[int, list[PackedTensor]] = {}
        self.blocks: dict[int, list[torch.Tensor]] = {}  # a layer's bytes in host memory
        self.copies = 0  # of whole layers to the device
        self._buffers: list[torch.Tensor] = []
        self._layer_in: list[int | None] = [None, None]  # the layer whose weights are in each buffer, or on the way
        self._last: int | None = None
        self._stream: Any = device.stream() if device.asynchronous and self.layers else None
        for number, layer in self.layers.items():
            wrap(layer, partial(self._brought, number))

    @property
    def host_bytes(self) -> int:
        return sum(block.numel() for blocks in self.blocks.values() for block in blocks)

    @torch.no_grad()
    def take(self, holder: nn.Module) -> None:
        """After a holder of weights was packed; nothing is done for those of other layers."""
        for number, layer in self.layers.items():
            holders = list(packed_layers(layer).values())
            if any(m is holder for m in holders) and all(m.is_packed for m in holders):
                self._to_host(number, holders)

    def _to_host(self, number: int, holders: list[Any]) -> None:
        found, size = list[PackedTensor](), 0
        values = list[torch.Tensor]()
        for holder in holders:
            for name, value in holder.named_buffers(recurse=False):
                if name.startswith("packed_"):
                    found.append(PackedTensor(holder, name, size, torch.empty_like(value, device="meta")))
                    values.append(value)
                    size = after(size, value)
        whole = torch.empty(size, dtype=torch.uint8, device=self.device.handle)
        for tensor, value in zip(found, values, strict=True):
            seen_in(whole, tensor).copy_(value)
        self.blocks[number] = [self._host_copy(piece) for piece in whole.split(BLOCK)]
        self.tensors[number] = found
        for tensor in found:
            tensor.show(tensor.like)

    def _host_copy(self, piece: torch.Tensor) -> torch.Tensor:
        out = torch.empty(piece.shape, dtype=torch.uint8, pin_memory=self.device.pins_memory)
        return out.copy_(piece)

    def _brought(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            buffer = self._bring(number)
            for tensor in self.tensors[number]:
                tensor.show(seen_in(self._buffers[buffer], tensor))
            try:
                return forward(*args)
            finally:  # at another time the buffer has another layer's weights
                for tensor in self.tensors[number]:
                    tensor.show(tensor.like)

        return run

    def _bring(self, number: int) -> int:
        """The buffer that has the layer's weights; those of the layer that should be next are on their way after it."""
        if not self._buffers:
            size = max(sum(b.numel() for b in blocks) for blocks in self.blocks.values())
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device.handle) for _ in range(2)]
        if number not in self._layer_in:
            self._copy(number, 0 if self._last is None else 1 - self._buffer_of(self._last))
        if self._stream is not None:
            self.device.current_stream().wait_stream(self._stream)
        buffer, after = self._buffer_of(number), self.following(number)
        self._last = number
        if after is not None and after not in self._layer_in:
            self._copy(after, 1 - buffer)
        return buffer

    def _buffer_of(self, number: int) -> int:
        return self._layer_in.index(number)

    def following(self, number: int) -> int | None:
        """Layers come in order, and in backward the other way round; the last one twice in a row."""
        at = self.order.index(number)
        upwards = self._last is None or number > self._last
        for place in (at + 1, at - 1) if upwards else (at - 1, at + 1):
            if 0 <= place < len(self.order):
                return self.order[place]
        return None

    def _copy(self, number: int, buffer: int) -> None:
        """Behind all that was launched so far: the layer whose weights are in the buffer is done with them."""
        self._layer_in[buffer] = number
        self.copies += 1
        if self._stream is None:
            self._fill(number, buffer)
            return
        self._stream.wait_stream(self.device.current_stream())
        with self.device.on_stream(self._stream):
            self._fill(number, buffer)

    @torch.no_grad()
    def _fill(self, number: int, buffer: int) -> None:
        start = 0
        for block in self.blocks[number]:
            self._buffers[buffer][start : start + block.numel()].copy_(block, non_blocking=True)
            start += block.numel()
