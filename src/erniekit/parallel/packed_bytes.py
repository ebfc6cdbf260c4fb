"""Packed tensors of frozen weights end to end in one run of bytes: what host_layers.py copies and packed_shards.py
gathers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

NAME = "packed_bytes"  # of the parameter that holds them, where ranks have pieces of it
ALIGNED = 256  # where a tensor may begin


class PackedTensor(NamedTuple):
    """Whose buffer it is, and where it lies among the bytes."""

    holder: nn.Module
    name: str
    start: int
    like: torch.Tensor  # its shape and dtype, without memory

    @property
    def stop(self) -> int:
        return self.start + self.like.nbytes

    def show(self, value: torch.Tensor) -> None:
        """From now on the holder multiplies by this."""
        self.holder._buffers[self.name] = value


def after(start: int, tensor: torch.Tensor) -> int:
    """Where the next tensor begins."""
    return start + -(-tensor.nbytes // ALIGNED) * ALIGNED


def seen_in(whole: torch.Tensor, tensor: PackedTensor) -> torch.Tensor:
    """The tensor among whole uint8 [bytes]. Through `data`: autograd counts changes to the memory, and what backward
    reads is what its layer was given."""
    return whole.data[tensor.start : tensor.stop].view(tensor.like.dtype).view(tensor.like.shape)
