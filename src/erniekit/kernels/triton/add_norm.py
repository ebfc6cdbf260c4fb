"""Sum and norm of a token in one program. Called by kernels/add_norm.py. T tokens, H hidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    T, H = x.shape
    out = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    block = triton.next_power_of_2(H)
    _rows[(T,)](
        x, x if added is None else added, weight, total, out, H, eps,
        ADDS=added is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return total, out
