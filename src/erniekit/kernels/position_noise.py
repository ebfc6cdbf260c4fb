"""Random bits of a weight's position: what stochastic rounding draws. Used by kernels/adamw.py and moments8.py.

A draw depends on the run's seed, the tensor's name, the update's number and the element's row and column in the whole
tensor, and on nothing else. So a resumed run draws the same, and so does every layout: a rank has which rows and
columns it holds (TensorPart). kernels/triton/lean_adamw.py computes the same bits.

Where an element begins is random; from update to update its draw goes on by the golden ratio, so that few draws in a
row are spread evenly. A weight that moves by a tenth of a step then rises in every tenth update, nearly, and what
rounding adds to it does not grow with the number of updates as it would with independent draws.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from erniekit.kernels.rounding_noise import SALTS, SPREADS

ROW, COLUMN = 0xC2B2AE35, 0x27D4EB2F  # odd factors of a row's and a column's number
LAST_SHIFT = 16  # after SPREADS: the low bits depend on every bit as well
# Added with every update: of 2**16 the golden ratio in the high half, the square root of two less one in the low half.
TURN = (40503 << 16) | 27145


class TensorPart(NamedTuple):
    """Where a rank's part of a tensor lies in the whole one, and what its draws begin with."""

    salt: int = 0  # of the run's seed and the tensor's name: 32 bits
    rows: torch.Tensor | None = None  # int32 [local rows]: their numbers in the whole tensor; None: all, in order
    first_column: int = 0
    block: int = 256  # columns that share a scale of 8-bit moments


def salt_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")


def draws(place: TensorPart, step: torch.Tensor, rows: int, columns: int, which: int = 0) -> torch.Tensor:
    """int32 [rows, columns] of this rank's part: 32 random bits each. step: the update's number. which: 0 for weights,
    1 for moments."""
    device = step.device
    number = torch.arange(rows, dtype=torch.int32, device=device) if place.rows is None else place.rows
    column = torch.arange(columns, dtype=torch.int32, device=device) + place.first_column
    row_key = mix(number * signed(ROW) + signed(place.salt))
    start = mix(row_key[:, None] ^ (column * signed(COLUMN)))
    if which:
        start = mix(start + signed(SALTS[1]))
    return start + step.to(torch.int32) * signed(TURN)


def mix(h: torch.Tensor) -> torch.Tensor:
    for shift, factor in SPREADS:
        h = (h ^ _shifted(h, shift)) * signed(factor)
    return h ^ _shifted(h, LAST_SHIFT)


def high16(h: torch.Tensor) -> torch.Tensor:
    return _shifted(h, 16)


def low16(h: torch.Tensor) -> torch.Tensor:
    return h & 0xFFFF


def _shifted(h: torch.Tensor, shift: int) -> torch.Tensor:
    return (h >> shift) & ((1 << 32 - shift) - 1)


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
