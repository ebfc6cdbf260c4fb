"""Rows of activations in fp8 (e4m3), each with a scale. The definitions are in torch; on an NVIDIA card Triton kernels
compute the same (triton/fp8_rows.py). R rows, E experts.
"""

from __future__ import annotations

import torch

from erniekit.kernels.available import runs_triton

HIGHEST = 448.0  # of e4m3
LEAST = 1e-30  # a row's largest number counts as this at least: rows of zeros stay zeros, and 1 / scale stays finite

Scaled = tuple[torch.Tensor, torch.Tensor]  # fp8 [..., K] and fp32 [..., 1]
Rows = torch.Tensor | Scaled


def quantised(x: torch.Tensor) -> Scaled:
    """x [..., K] -> fp8 [..., K] and its rows' scales, fp32 [..., 1]: x is about fp8 * scale. What is not finite stays
    so in the product."""
    if runs_triton(x):
        from erniekit.kernels.triton import fp8_rows

        return fp8_rows.quantise(x)
    return reference(x)


def quantised_with(x: torch.Tensor, factor: torch.Tensor) -> Scaled:
    """x [R, K] times factor fp32 [K], rounded."""
    if runs_triton(x):
        from erniekit.kernels.triton import fp8_rows

        return fp8_rows.quantise_with(x, factor)
    return reference(x.float() * factor)


def quantised_by_expert(
    x: torch.Tensor, factor: torch.Tensor, ends: torch.Tensor, row_of: torch.Tensor | None = None, k: int = 1
) -> Scaled:
    """Rows sorted by expert, each times its expert's factor, fp32 [E, K], rounded. Past the last end: undefined.
    row_of: x has tokens [T, K], and row r is that of choice row_of[r], k choices a token."""
    if runs_triton(x):
        from erniekit.kernels.triton import fp8_rows

        return fp8_rows.quantise_by_expert(x, factor, ends, row_of, k)
    return by_expert_reference(x, factor, ends, row_of, k)


def by_expert_reference(
    x: torch.Tensor, factor: torch.Tensor, ends: torch.Tensor, row_of: torch.Tensor | None = None, k: int = 1
) -> Scaled:
    rows = x if row_of is None else x.index_select(0, row_of // k)
    numbers = torch.arange(rows.shape[0], device=x.device, dtype=ends.dtype)
    expert = torch.bucketize(numbers, ends, right=True).clamp(max=ends.shape[0] - 1)
    return reference(rows.float() * factor.index_select(0, expert))


def reference(x: torch.Tensor) -> Scaled:
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return rounded(x, most), most / HIGHEST


def rounded(x: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """`most` [..., 1] becomes the highest number of fp8."""
    return (x.float() * (HIGHEST / most)).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn)


def dequantised(x8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x8.float() * scale
