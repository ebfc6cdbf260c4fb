"""NF4 as bitsandbytes has it: 16 quantiles of a normal distribution, scaled by the largest magnitude of each 64.

Called by kernels/stored/nf4.py and by whatever writes or reads such files. Two codes a byte, the earlier number in the
high half. The largest magnitudes ("absmax") are either kept in fp32 or, "double quantisation", as 8-bit codes of their
difference from their mean, with a scale for each 256 of them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from erniekit.kernels.integers import magnitude

BLOCK = 64
NESTED_BLOCK = 256
# The quantiles as bitsandbytes writes them out: the last digits are those of its table.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
CPU = torch.device("cpu")
CHUNK = 1 << 22  # numbers that are encoded or decoded at a time: the steps between take several times their memory


class Nested(NamedTuple):
    """Absmax, quantised itself: code[codes] * scale + offset."""

    codes: torch.Tensor  # uint8 [blocks]
    scale: torch.Tensor  # fp32 [blocks / NESTED_BLOCK, rounded up]
    offset: torch.Tensor  # fp32, one number


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., in], in a multiple of BLOCK -> codes uint8 [.., in / 2], absmax fp32 [.., in / BLOCK]."""
    absmax = magnitude(weight.unflatten(-1, (-1, BLOCK)))
    return codes_of(weight, absmax), absmax


def codes_of(weight: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """uint8 [.., in / 2], for scales that are given."""
    middles = _middles(weight.device)
    codes = torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)
    blocks = zip(weight.reshape(-1).split(CHUNK), absmax.reshape(-1).split(CHUNK // BLOCK), strict=True)
    for (few, most), out in zip(blocks, codes.split(CHUNK // 2), strict=True):
        # Times the inverse, not divided: as bitsandbytes has it.
        scaled = few.float().unflatten(-1, (-1, BLOCK)) * (1 / most.clamp(min=1e-38)).unsqueeze(-1)
        nearest = torch.bucketize(scaled.clamp(-1, 1).flatten(), middles, out_int32=True).to(torch.uint8)
        out.copy_(pack(nearest))
    return codes.view(*weight.shape[:-1], -1)


def decode(codes: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[.., in], rounded to dtype once."""
    values = table(codes.device)
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=dtype, device=codes.device)
    few = zip(codes.reshape(-1).split(CHUNK // 2), absmax.reshape(-1).split(CHUNK // BLOCK), strict=True)
    for (packed, most), into in zip(few, out.view(-1).split(CHUNK), strict=True):
        into.copy_((values[unpack(packed).int()].unflatten(-1, (-1, BLOCK)) * most.unsqueeze(-1)).flatten())
    return out


def encode_flat(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as one row, as bitsandbytes' files have it: the last block may be shorter, and of an odd number the last
    half byte is empty. codes [count / 2, rounded up], absmax [count / BLOCK, rounded up]."""
    flat = weight.reshape(-1)
    codes, absmax = encode(torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)))
    return codes[: -(-len(flat) // 2)], absmax


def decode_flat(codes: torch.Tensor, absmax: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count]."""
    return decode(torch.nn.functional.pad(codes, (0, -len(codes) % (BLOCK // 2))), absmax, dtype)[:count]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, two a byte: the earlier in the high half."""
    return codes[..., 0::2] << 4 | codes[..., 1::2]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed >> 4, packed & 15), -1).flatten(-2)


def encode_absmax(absmax: torch.Tensor) -> Nested:
    """Of all blocks of a weight, in their order."""
    flat = absmax.reshape(-1)
    offset = flat.mean()
    padded = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    scale = padded.abs().amax(-1)
    codes = nearest_dynamic(padded / scale.clamp(min=1e-38).unsqueeze(-1), signed=True)
    return Nested(codes.flatten()[: len(flat)], scale, offset)


def decode_absmax(nested: Nested) -> torch.Tensor:
    """fp32 [blocks]."""
    scale = nested.scale.repeat_interleave(NESTED_BLOCK)[: len(nested.codes)]
    return dynamic_values(nested.codes, signed=True) * scale + nested.offset


def nearest_dynamic(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """uint8 codes of values between -1 (0: unsigned) and 1."""
    entries = dynamic_table(signed, values.device)
    return torch.bucketize(values, (entries[1:] + entries[:-1]) / 2, out_int32=True).to(torch.uint8)


def dynamic_values(codes: torch.Tensor, signed: bool) -> torch.Tensor:
    return dynamic_table(signed, codes.device)[codes.int()]


@cache
def dynamic_table(signed: bool, device: torch.device = CPU) -> torch.Tensor:
    """The 8-bit "dynamic" numbers, fp32 [256] ascending: seven decades below 1, each with twice the values of the one
    below (arXiv 1511.04561)."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, dtype=torch.float32)
        sizes = (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        numbers += sizes + ([-size for size in sizes] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@cache
def table(device: torch.device) -> torch.Tensor:
    """VALUES, fp32."""
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@cache
def _middles(device: torch.device) -> torch.Tensor:
    return (table(device)[:-1] + table(device)[1:]) / 2
