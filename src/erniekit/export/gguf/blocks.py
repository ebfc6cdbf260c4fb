"""Weights to the bytes of a GGUF type: blocks of 32 with one scale, the very bytes of ggml's own quantisers.

Called by file.py, a few rows at a time. In torch, since the gguf package takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from erniekit.export.gguf.types import BLOCK

# Between neighbours of 0, 1, 2, 3, 4, 6, 8, 12 (e2m1 doubled); a weight right on one goes to the smaller.
_BETWEEN = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
_TINY = 2.0**-120  # a block of smaller weights is stored as zeros: its scale would leave the range


def encode(weights: torch.Tensor, word: str) -> torch.Tensor:
    """[rows, columns] -> uint8 [rows, bytes]. Values the type cannot hold become inf or nan: `is_finite` finds them."""
    if word in _PLAIN:
        return weights.to(_PLAIN[word]).contiguous().view(torch.uint8)
    blocks = weights.float().reshape(-1, BLOCK)
    return _QUANTISERS[word](blocks).reshape(len(weights), -1)


def is_finite(weights: torch.Tensor, word: str) -> bool:
    """Whether the type can hold all of them."""
    largest = weights.abs().amax() if weights.numel() else torch.zeros(())
    limit = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8}.get(word, torch.finfo(torch.float32).max)
    return bool(largest <= limit)  # NaN is not


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    size = scaled.abs()
    whole = size.floor()
    rounded = whole + (2 * (size - whole)).floor()  # half away from zero
    values = (scaled.sign() * rounded).to(torch.int8)
    return torch.cat([_half(scale), values.view(torch.uint8)], -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """The largest weight, with its sign, is -8 times the scale; those at the other end are cut at 7."""
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    values = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([_half(scale), _nibbles(values)], -1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """The scale is a power of two, such that the largest weight lies between 8 and 16 halves of it."""
    largest = blocks.abs().amax(-1, keepdim=True)
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


def _half(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.float16).view(torch.uint8)


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """The first half of a block in the low four bits, the second in the high ones."""
    low, high = values.split(BLOCK // 2, -1)
    return low | (high << 4)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "MXFP4": _mxfp4}
