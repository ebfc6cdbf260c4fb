"""Two codes of 4 bits in a byte, the earlier column in the low half. Used by the formats that are kept so."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 below 16, [.., in] -> [.., in / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_signed(values: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7."""
    return pack(values.to(torch.int8).view(torch.uint8) & 15)


def unpack_signed(packed: torch.Tensor) -> torch.Tensor:
    """int8."""
    return (unpack(packed) ^ 8).view(torch.int8) - 8
