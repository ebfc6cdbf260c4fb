"""Sum and norm of a token in one program, and their gradients. Called by kernels/add_norm.py. T tokens, H hidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 2112  # of programs that add up a weight's gradient, each a share of the tokens': 16 a processor of an H200


@triton.jit
def _rows(
    x, added, weight, total, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    own = column < width
    kind = out.dtype.element_ty
    value = tl.load(x + at + column, mask=own, other=0.0)
    if ADDS:
        more = tl.load(added + at + column, mask=own, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(kind)  # rounded before it is normalised, as it is kept
        tl.store(total + at + column, value, mask=own)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scale = tl.load(weight + column, mask=own, other=0.0)
    tl.store(out + at + column, (scale.to(tl.float32) * normed.to(kind).to(tl.float32)).to(kind), mask=own)


@triton.jit
def _rows_back(
    of_total, of_normed, total, weight, out, of_weight, rows, width, eps,
    ADDS: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every so manyth token. WEIGHT: its sum of the weight's gradient is a row of of_weight."""
    column = tl.arange(0, BLOCK)
    own = column < width
    kind = out.dtype.element_ty
    scale = tl.load(weight + column, mask=own, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0)
    while row < rows:
        at = row.to(tl.int64) * width + column
        wide = tl.load(total + at, mask=own, other=0.0).to(tl.float32)
        grad = tl.load(of_normed + at, mask=own, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        normed = wide * factor
        if WEIGHT:
            sums += grad * normed.to(kind).to(tl.float32)  # rounded as what the weight multiplied
        grad *= scale
        found = factor * (grad - normed * (tl.sum(grad * normed, 0) / width))
        if ADDS:
            found += tl.load(of_total + at, mask=own, other=0.0).to(tl.float32)
        tl.store(out + at, found.to(kind), mask=own)
        row += tl.num_programs(0)
    if WEIGHT:
        tl.store(of_weight + tl.program_id(0).to(tl.int64) * width + column, sums, mask=own)


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, added contiguous [..., H] -> both as x; without `added` the sum is x itself."""
    out = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    block, warps = _block(x.shape[-1])
    _rows[(x.numel() // x.shape[-1],)](
        x, x if added is None else added, weight, total, out, x.shape[-1], eps,
        ADDS=added is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return total, out


def gradients(
    of_total: torch.Tensor | None,
    of_normed: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of both outputs [..., H] -> of what was summed [..., H], and of the weight [H]."""
    width = total.shape[-1]
    rows = total.numel() // width
    total, of_normed = total.contiguous(), of_normed.contiguous()
    of_total = None if of_total is None else of_total.contiguous()
    block, warps = _block(width)
    out, programs = torch.empty_like(total), min(rows, WARPS // warps) if with_weight else rows
    sums = torch.empty(programs if with_weight else 0, width, dtype=torch.float32, device=total.device)
    _rows_back[(programs,)](
        of_normed if of_total is None else of_total, of_normed, total, weight, out, sums, rows, width, eps,
        ADDS=of_total is not None, WEIGHT=with_weight, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out, sums.sum(0).to(weight.dtype) if with_weight else None


def _block(width: int) -> tuple[int, int]:
    """Numbers and warps of a program."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 512))
