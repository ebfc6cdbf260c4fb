"""The gradient of keys that several documents looked at, for NVIDIA cards. Called by kernels/packed_attention.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_places(rows, places, out, W: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + token * COPIES + copy).to(tl.int64)
        total += tl.load(rows + place * W + cols, mask=(cols < W) & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * W + cols, total.to(out.dtype.element_ty), mask=cols < W)


def sum_places(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows [keys, ...] contiguous, places int32 [T, copies], -1 where there are fewer -> [T, ...], added in fp32 and in
    one order always."""
    out = rows.new_empty(places.shape[0], *rows.shape[1:])
    W = rows[0].numel()
    _sum_places[(places.shape[0],)](
        rows, places, out, W=W, COPIES=places.shape[1], BLOCK=triton.next_power_of_2(W), num_warps=2
    )
    return out
