"""Attention without direction inside each frame of pictures and videos, never across frames. Called by
models/layers/vision.py.

P patches of all frames end to end, N heads, D head_dim. No path forms a P x P or a frame's whole square in memory.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels.selection import FrameFacts, chosen


def frame_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int], bounds: torch.Tensor | None = None
) -> torch.Tensor:
    """q, k, v [P, N, D] -> [P, N, D]. sizes: the patches of each frame, on the host. bounds: int32 [frames + 1], where
    each begins, on the device; None: made here."""
    if not sizes:
        return q + k + v  # no rows; gradients of none reach all three
    if chosen("frame attention", FrameFacts(q.device, q.dtype, q.shape[-1])) == "flash":
        return _varlen(q, k, v, sizes, bounds)
    return _by_size(q, k, v, sizes)


def _by_size(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Frames of one size that follow each other in one call."""
    out, start = [], 0
    for size, group in groupby(sizes):
        count = len(list(group))
        here = slice(start, start + size * count)
        parts = (t[here].unflatten(0, (count, size)).transpose(1, 2) for t in (q, k, v))
        out.append(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1))
        start += size * count
    return out[0] if len(out) == 1 else torch.cat(out)


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int], bounds: torch.Tensor | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if bounds is None:
        bounds = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(q.device, non_blocking=True)
    longest = max(sizes)
    result: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, -1))
    return result  # type: ignore[no-any-return]
