"""Weights to the bytes of a GGUF type and back: blocks of 32 with one scale, the very bytes of ggml's own quantisers.

Called by file.py, a few rows at a time. In torch, since the gguf package takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from erniekit.export.gguf.types import BLOCK, BLOCK_BYTES

_E2M1 = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # doubled
# Between two neighbours of them; a weight right on one goes to the smaller.
_BETWEEN = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
# The largest number below a half: added to 0.49999997 it does not reach one, as a half would.
_UNDER_HALF = torch.tensor(0.5).nextafter(torch.zeros(()))
_TINY = 2.0**-120  # a block of smaller weights is stored as zeros: its scale would leave the range


class Unstorable(ValueError):
    """A weight is inf or nan, or too large for the type."""


def encode(weights: torch.Tensor, type_name: str) -> torch.Tensor:
    """[rows, columns] -> uint8 [rows, bytes]."""
    if type_name in _PLAIN:
        out = weights.to(_PLAIN[type_name]).contiguous()
        _require_finite(out)
        return out.view(torch.uint8)
    blocks = weights.float().reshape(-1, BLOCK)
    return _QUANTISERS[type_name](blocks).reshape(len(weights), -1)


def decode(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """uint8 [rows, bytes] -> fp32 [rows, columns]."""
    if type_name in _PLAIN:
        return data.view(_PLAIN[type_name]).float()
    blocks = data.reshape(-1, BLOCK_BYTES[type_name])
    if type_name == "Q8_0":
        out = blocks[:, 2:].view(torch.int8) * blocks[:, :2].view(torch.float16).float()
    elif type_name == "Q4_0":
        out = (_halves(blocks[:, 2:]).to(torch.int8) - 8) * blocks[:, :2].view(torch.float16).float()
    else:
        out = _E2M1[_halves(blocks[:, 1:]).int()] * torch.exp2(blocks[:, :1] - 128.0)
    return out.reshape(len(data), -1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    out = blocks.new_empty(len(blocks), BLOCK_BYTES["Q8_0"], dtype=torch.int8)
    scale = _largest(blocks) / 127
    out[:, :2] = _half(scale)
    scaled = blocks * _inverse(scale)
    scaled += torch.copysign(_UNDER_HALF, scaled)
    out[:, 2:] = scaled  # cut off towards zero: half away from zero
    return out.view(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """The largest weight, with its sign, is -8 times the scale; those at the other end are cut at 7."""
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    values = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([_half(scale).view(torch.uint8), _nibbles(values)], -1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """The scale is a power of two, such that the largest weight lies between 8 and 16 halves of it."""
    largest = _largest(blocks)
    _require_finite(largest)
    exponent = torch.where(largest > _TINY, torch.frexp(largest).exponent + 124, 0)
    scaled = blocks * torch.where(largest > _TINY, torch.exp2(128.0 - exponent), 0.0)
    size = scaled.abs()
    index = torch.zeros_like(size, dtype=torch.uint8)
    for bound in _BETWEEN:
        index += size > bound
    values = index | (((scaled < 0) & (index > 0)).to(torch.uint8) << 3)
    return torch.cat([exponent.to(torch.uint8), _nibbles(values)], -1)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    out = 1 / scale
    return torch.where(out.isfinite(), out, 0.0)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    return torch.maximum(high, -low).abs()  # of zeros: no minus


def _half(scale: torch.Tensor) -> torch.Tensor:
    out = scale.to(torch.float16)
    _require_finite(out)
    return out.view(torch.int8)


def _require_finite(values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise Unstorable


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """The first half of a block in the low four bits, the second in the high ones."""
    low, high = values.split(BLOCK // 2, -1)
    return low | (high << 4)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Undoes _nibbles."""
    return torch.cat([packed & 15, packed >> 4], -1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "MXFP4": _mxfp4}
