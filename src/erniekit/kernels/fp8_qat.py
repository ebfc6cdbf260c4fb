"""Numbers in fp8 with one scale a tensor, and with one a block; their products; the rotation that may go before.

The definitions behind kernels/stored/fp8_static.py and fp8_blocks.py: what FP8 training (QAT) rounds to is what a
server of the exported weights computes. Products run on tensor cores where the card has them (kernels/selection.py),
elsewhere as fp8 values multiplied in fp32, rounded once. R rows, K width, N outputs, E experts.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from erniekit.kernels import fp8_product
from erniekit.kernels.grouped_gemm import grouped_outer, spans
from erniekit.kernels.quantised_rows import LEAST
from erniekit.kernels.selection import Fp8Facts, chosen

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HIGHEST = {E4M3: 448.0, E5M2: 57344.0}
BLOCK = 128  # of block-wise scales


@functools.cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """fp32 [size, size]: Sylvester's matrix over sqrt(size), its own inverse. size: a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    out: torch.Tensor = matrix / float(size) ** 0.5
    return out.to(device)


def rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [..., K] -> fp32, each `block` columns times the matrix above; 0: as it is. On both sides of a product it
    cancels, and an outlier's share goes to all columns of its block. Twice is not at all."""
    if not block:
        return x.float()
    blocks: torch.Tensor = x.float().unflatten(-1, (-1, block)) @ hadamard(block, x.device)
    return blocks.flatten(-2)


def largest(x: torch.Tensor) -> torch.Tensor:
    """fp32 []: of the absolute values; zero of none."""
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def scale_of(most: torch.Tensor, highest: float = HIGHEST[E4M3]) -> torch.Tensor:
    """The scale with which `most` becomes `highest`."""
    return most.float().clamp(min=LEAST) / highest


def to_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """x / scale in fp8; what is too large becomes the highest number. By the reciprocal, as vLLM's kernel does."""
    most = HIGHEST[dtype]
    return (x.float() * scale.reciprocal()).clamp(-most, most).to(dtype)


def product(x8: torch.Tensor, xs: torch.Tensor, w8: torch.Tensor, ws: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x8 [R, K], w8 [N, K], a scale of each (fp32, one element) -> x w^T [R, N]."""
    facts = Fp8Facts(x8.device, x8.shape[1], w8.shape[0])
    if chosen("fp8 products", facts) == "emulated" or not x8.shape[0]:
        return ((x8.float() @ w8.float().t()) * (xs.reshape(()) * ws.reshape(()))).to(dtype)
    out = torch._scaled_mm(
        x8, w8.t(), scale_a=xs.reshape(()), scale_b=ws.reshape(()), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(dtype)


def grouped(
    rows8: torch.Tensor, xs: torch.Tensor, w8: torch.Tensor, ws: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """rows8 [R, K] sorted by expert, xs (one element), w8 [E, N, K], ws [E] -> [R, N]; zeros, or anything on a card,
    past the last end."""
    facts = Fp8Facts(rows8.device, rows8.shape[1], w8.shape[1], experts=True)
    if chosen("fp8 products", facts) == "emulated" or not rows8.shape[0]:
        out = rows8.new_zeros(rows8.shape[0], w8.shape[1], dtype=dtype)
        for e, span in spans(ends):
            each = (rows8[span].float() @ w8[e].float().t()) * (xs.reshape(()) * ws[e])
            out[span] = each.to(dtype)
        return out
    by_row = xs.reshape(1, 1).expand(rows8.shape[0], 1).contiguous()
    by_output = ws.reshape(-1, 1, 1).expand(-1, w8.shape[1], 1).contiguous()
    return fp8_product.grouped(rows8, by_row, w8, by_output, ends, dtype)


def outer(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """grad [R, N], x [R, K] -> grad^T x [N, K]; with ends [E, N, K]."""
    return grad.t() @ x if ends is None else grouped_outer(grad, x, ends)


# --- blocks: 1 x 128 of activations and gradients, 128 x 128 of weights; scales are the blocks' own, always ---


def row_blocks(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., K] as e4m3 in blocks of 1 x 128 holds it: rounded, and multiplied out again."""
    width = x.shape[-1]
    wide = F.pad(x.float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = scale_of(wide.abs().amax(-1, keepdim=True))
    return (to_fp8(wide, scale).float() * scale).flatten(-2)[..., :width].to(dtype)


def square_blocks(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight [.., N, K] as e4m3 in blocks of 128 x 128 holds it. The transpose is rounded alike."""
    rows, width = weight.shape[-2:]
    wide = F.pad(weight.float(), (0, -width % BLOCK, 0, -rows % BLOCK))
    wide = wide.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [.., rows / 128, 128, columns / 128, 128]
    scale = scale_of(wide.abs().amax((-3, -1), keepdim=True))
    whole = (to_fp8(wide, scale).float() * scale).flatten(-2).flatten(-3, -2)
    return whole[..., :rows, :width].to(dtype)
