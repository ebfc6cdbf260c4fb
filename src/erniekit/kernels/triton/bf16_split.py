"""An fp32 matrix as bf16 parts side by side or one below the other, in one launch. Called by kernels/router_logits.py,
which defines them in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _split(
    value, out, total, width, by_row, by_part,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    rest = tl.load(value + at, mask=inside, other=0.0)
    high = rest.to(tl.bfloat16)
    rest -= high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    to = out + (at // width) * by_row + at % width
    tl.store(to, high if FIRST == 0 else (middle if FIRST == 1 else low), mask=inside)
    tl.store(to + by_part, high if SECOND == 0 else (middle if SECOND == 1 else low), mask=inside)
    tl.store(to + 2 * by_part, high if THIRD == 0 else (middle if THIRD == 1 else low), mask=inside)


def side_by_side(value: torch.Tensor, which: tuple[int, int, int], dim: int) -> torch.Tensor:
    """value fp32 [R, C] -> the parts `which` of it (0 the largest) along `dim`: [3 R, C] or [R, 3 C]."""
    value = value.contiguous()
    R, C = value.shape
    out = torch.empty((3 * R, C) if dim == 0 else (R, 3 * C), dtype=torch.bfloat16, device=value.device)
    by_row, by_part = (C, R * C) if dim == 0 else (3 * C, C)
    _split[(triton.cdiv(R * C, BLOCK),)](value, out, R * C, C, by_row, by_part, *which, BLOCK=BLOCK)
    return out
