"""MXFP4 as the OCP MX standard has it and compressed-tensors writes it: e2m1 values, a power of two for each 32 of a row.

Called by kernels/stored/mxfp4.py and by whatever writes or reads such files. A code is 4 bits: the sign, then the index
into VALUES. Two codes a byte, the earlier column in the low half. A scale is the byte e8m0: 2 ** (byte - 127).

The rule of a scale, with `most` the largest magnitude of its 32: floor(log2(most)) - 2, and one more where `most` is at
least 1.75 times its power of two. So the largest is at most 7 before it is rounded, and what lies above 6 becomes 6.
Values are rounded to the nearest, ties to the code whose last bit is 0.
"""

from __future__ import annotations

import torch

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of e8m0
CHUNK = 4096  # rows that are encoded or decoded at a time: the steps between take several times their memory

_LARGEST_EXPONENT = 2  # of 6 = 1.5 * 2 ** 2
_SPLIT = {torch.bfloat16: (torch.int16, 7), torch.float32: (torch.int32, 23)}  # dtype: its bits, those of the mantissa


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., in], in a multiple of GROUP -> codes uint8 [.., in / 2], scales uint8 [.., in / GROUP]."""
    rows = weight.reshape(-1, weight.shape[-1])
    codes = torch.empty(len(rows), rows.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(rows), rows.shape[1] // GROUP, dtype=torch.uint8, device=weight.device)
    for few, out, scale in zip(rows.split(CHUNK), codes.split(CHUNK), scales.split(CHUNK), strict=True):
        grouped = few.float().unflatten(-1, (-1, GROUP))
        scale.copy_(scale_bytes(grouped.abs().amax(-1)))
        out.copy_(pack(nearest_codes(grouped * powers(2 * BIAS - scale.int()).unsqueeze(-1)).flatten(-2)))
    return codes.view(*weight.shape[:-1], -1), scales.view(*weight.shape[:-1], -1)


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[.., in]. Exact in bf16 and fp32, but for scales whose products leave the dtype's range."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype, device=codes.device)
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=dtype, device=codes.device)
    flat = (t.reshape(-1, t.shape[-1]).split(CHUNK) for t in (codes, scales, out))
    for few, scale, into in zip(*flat, strict=True):
        numbers = values[unpack(few).int()].unflatten(-1, (-1, GROUP))
        into.copy_((numbers * powers(scale.int()).to(dtype).unsqueeze(-1)).flatten(-2))
    return out


def scale_bytes(most: torch.Tensor) -> torch.Tensor:
    """Of groups whose largest magnitude is `most`, uint8. A group of zeros has the smallest scale."""
    bits, mantissa = _SPLIT[most.dtype]
    # The carry of the added quarter goes into the exponent from 1.75 on. Of what is 0 or subnormal nothing is left.
    exponent = (most.view(bits) + (1 << mantissa - 2)) >> mantissa
    return (exponent.int() - _LARGEST_EXPONENT).clamp(min=0).to(torch.uint8)


def powers(scales: torch.Tensor) -> torch.Tensor:
    """2 ** (scale - 127) in fp32, of integers from 0 to 254."""
    return torch.where(scales > 0, scales.int() << 23, 1 << 22).int().view(torch.float32)  # by its bits: exact


def nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 below 16, of values in units of their scale. What is negative and rounds to 0 keeps its sign."""
    size = values.abs()
    codes = (values < 0).to(torch.uint8) << 3
    middles = [(a + b) / 2 for a, b in zip(VALUES, VALUES[1:])]
    for index, middle in enumerate(middles):
        codes += size > middle if index % 2 == 0 else size >= middle
    return codes


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, two a byte: the earlier in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
