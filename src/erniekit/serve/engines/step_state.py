"""What steps launched ahead share on the device: each running sequence's last token, place, blocks and sampling.

Used by recorded.py. A sequence has a slot, a row of every tensor here, whose address never changes. The device moves
tokens and places on by itself; the host keeps a copy of everything but the tokens, writes what changes into it, and
sends it as a whole. The last slot is for padding rows of a batch. S slots, M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

PLACE, TURN, TABLE = 0, 1, 2  # columns of `numbers`; blocks from TABLE on
COPIES = 16  # of what is sent: more than can be on their way


class Sent:
    """A tensor of the device and the host's copy of it, which is sent when it has changed."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pinned: bool) -> None:
        self.there = torch.zeros(*shape, dtype=dtype, device=device)
        self.here: np.ndarray = torch.zeros(*shape, dtype=dtype).numpy()
        self.changed = True
        self._copies = [torch.zeros(*shape, dtype=dtype, pin_memory=True) for _ in range(COPIES)] if pinned else []
        self._next = 0

    def send(self) -> None:
        """Not waited for, where memory is pinned."""
        if not self.changed:
            return
        self.changed = False
        if not self._copies:
            self.there.copy_(torch.from_numpy(self.here))
            return
        copy = self._copies[self._next]
        self._next = (self._next + 1) % COPIES
        copy.numpy()[...] = self.here
        self.there.copy_(copy, non_blocking=True)

    def put(self, values: Any) -> None:
        """All of them; sent only if they are others."""
        if not np.array_equal(self.here, values):
            self.here[...] = values
            self.changed = True
        self.send()


class StepState:
    """slots: sequences at once; blocks: of one. spare: the block that padding rows write to."""

    def __init__(self, slots: int, blocks: int, spare: int, device: torch.device, pinned: bool) -> None:
        self.padding_slot = slots
        self.free = list(range(slots - 1, -1, -1))
        self.tokens = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.numbers = Sent((slots + 1, TABLE + blocks), torch.int32, device, pinned)
        self.floats = Sent((slots + 1, 2), torch.float32, device, pinned)
        self.integers = Sent((slots + 1, 3), torch.int64, device, pinned)
        self.models = Sent((slots + 1,), torch.int64, device, pinned)
        self.numbers.here[slots, TABLE:] = spare
        self.integers.here[slots, 1] = 1

    @property
    def tables(self) -> torch.Tensor:
        return self.numbers.there[:, TABLE:]

    def set_sampling(self, slot: int, floats: tuple[float, float], integers: tuple[int, int, int]) -> None:
        self.floats.here[slot], self.integers.here[slot] = floats, integers
        self.floats.changed = self.integers.changed = True

    def set_model(self, slot: int, number: int) -> None:
        self.models.here[slot] = number
        self.models.changed = True

    def set_table(self, slot: int, table: Sequence[int]) -> None:
        self.numbers.here[slot, TABLE : TABLE + len(table)] = table
        self.numbers.changed = True

    def set_place(self, slot: int, place: int, turn: int) -> None:
        self.numbers.here[slot, :TABLE] = place, turn
        self.numbers.changed = True

    def move_on(self, slots: Sequence[int], steps: int) -> None:
        """As the device does by itself."""
        self.numbers.here[slots, :TABLE] += steps

    def send(self) -> None:
        self.numbers.send()
        self.floats.send()
        self.integers.send()
        self.models.send()
