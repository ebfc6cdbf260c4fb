"""Weights as compressed-tensors stores them: scales, rounding and packing, each a plain function on tensors.

Called by quantize/ (writing) and checkpoint/quantised.py (reading). All is symmetric and row-aligned: R rows, K
columns, G scales a row. Scales have the weight's dtype, as every reader of these files holds them; a weight is divided
by its scale in fp32.
"""

from __future__ import annotations

import sys

import torch

from erniekit.kernels import mxfp4
from erniekit.quant_schemes import Scheme

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
assert sys.byteorder == "little", "packed words are written as the bytes of a little-endian machine"


def half_range(scheme: Scheme) -> float:
    """The largest magnitude of a group becomes this: half of what the codes span, so for int4 7.5 and not 7."""
    return FP8_MOST if scheme.number == "float" else (2**scheme.bits - 1) / 2


def scales_of(weight: torch.Tensor, scheme: Scheme, parts: int = 1) -> torch.Tensor:
    """[R, K] -> [R, G] in the weight's dtype; of mxfp4 the exponents, uint8. parts: how many tensors of equal size lie
    end to end in the rows, each of which has a scale of its own under strategy tensor."""
    size = scheme.group or weight.shape[1]
    most = weight.unflatten(1, (-1, size)).abs().amax(-1)
    if scheme.is_mxfp4:
        return mxfp4.scale_bytes(most.float())
    if scheme.strategy == "tensor":
        most = most.view(parts, -1).amax(1).repeat_interleave(len(weight) // parts)[:, None]
    scale = (most.float() / half_range(scheme)).to(weight.dtype)
    return torch.where(scale == 0, torch.finfo(weight.dtype).eps, scale)


def input_scale(most: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Of activations whose largest magnitude is `most`: one number, [1]."""
    scale = (most.float().reshape(1) / half_range(scheme)).to(dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale)


def factors(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """What codes are multiplied by, fp32."""
    return mxfp4.powers(scale.int()) if scheme.is_mxfp4 else scale.float()


def to_grid(value: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """fp32 values in units of their scale -> the nearest that have a code, fp32."""
    if scheme.is_mxfp4:
        table = torch.tensor([*mxfp4.VALUES, *(-v for v in mxfp4.VALUES)], device=value.device)
        return table[mxfp4.nearest_codes(value).int()]
    if scheme.number == "float":
        return value.clamp(-FP8_MOST, FP8_MOST).to(FP8).float()
    return value.clamp(-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1).round()


def rounded(weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """fp32 [R, K]: the nearest weight that these scales can store."""
    step = factors(scale, scheme).repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    return to_grid(weight.float() / step, scheme) * step


def encode(weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """[R, K] -> the codes as they lie in a file: int32 words, int8, fp8, or two fp4 a byte."""
    step = factors(scale, scheme).repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    units = weight.float() / step
    if scheme.is_mxfp4:
        return mxfp4.pack(mxfp4.nearest_codes(units))
    codes = to_grid(units, scheme)
    if scheme.number == "float":
        return codes.to(FP8)
    return pack_words(codes.to(torch.int8), scheme.bits) if scheme.format == "pack-quantized" else codes.to(torch.int8)


def decode(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [R, columns]. Multiplied in the scales' dtype, as transformers and compressed-tensors do."""
    if scheme.is_mxfp4:
        return mxfp4.decode(codes, scale, dtype)
    if scheme.format == "pack-quantized":
        codes = unpack_words(codes, scheme.bits, columns)
    values = codes.to(scale.dtype).unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)
    out: torch.Tensor = values.flatten(1).to(dtype)
    return out


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [R, K] of 4 or 8 bits -> int32 [R, K * bits / 32, rounded up]: the earlier number in the lower bits, each
    counted from its smallest."""
    unsigned = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % (32 // bits)))
    return (mxfp4.pack(unsigned) if bits == 4 else unsigned).contiguous().view(torch.int32)


def unpack_words(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    unsigned = words.contiguous().view(torch.uint8)
    if bits == 4:
        unsigned = mxfp4.unpack(unsigned)
    codes: torch.Tensor = (unsigned[:, :columns].to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    return codes


def rounded_inputs(x: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Activations as an engine of this scheme meets them: rounded to the grid, token by token or by a stored scale."""
    if not scheme.inputs:
        return x
    if scheme.static_inputs:
        assert scale is not None
        step = scale.float()
    else:
        step = x.abs().amax(-1, keepdim=True).float() / half_range(scheme)
        step = torch.where(step == 0, torch.finfo(x.dtype).eps, step)
    return (to_grid(x.float() / step, scheme) * step).to(x.dtype)
