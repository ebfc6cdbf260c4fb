"""Products of rows with their experts' matrices in plain torch, where the device has no grouped product and the host
should not wait to learn how many rows each expert has.

Each expert's rows are laid out in whole blocks: R rows of E experts need at most R / BLOCK + E blocks, a number known
without a wait for the device, and a block meets one expert. Called by grouped_gemm.py. `ends` as there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 64  # rows; each expert wastes half of one on average


class RowBlocks(NamedTuple):
    """Where rows go. All on the device, with shapes that follow from those of the arguments."""

    place: torch.Tensor  # int64 [R], of a row among the blocks' rows; past them for a row of no expert
    expert: torch.Tensor  # int64 [blocks]
    number: int


def blocks_of(rows: int, ends: torch.Tensor) -> RowBlocks:
    experts = ends.numel()
    count = rows // BLOCK + experts
    ends = ends.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    used = (ends - starts + BLOCK - 1) // BLOCK  # blocks of each expert
    last = used.cumsum(0)
    token = torch.arange(rows, device=ends.device)
    owner = torch.searchsorted(ends, token, right=True)
    inside = owner.clamp(max=experts - 1)
    place = (last - used)[inside] * BLOCK + token - starts[inside]
    place = torch.where(owner < experts, place, count * BLOCK)
    # RowBlocks that nothing fills meet the last expert: zeros times its matrix.
    expert = torch.searchsorted(last, torch.arange(count, device=ends.device), right=True).clamp(max=experts - 1)
    return RowBlocks(place, expert, count)


def _laid_out(rows: torch.Tensor, blocks: RowBlocks) -> torch.Tensor:
    """[blocks, BLOCK, D]; the one row behind them takes what belongs to no expert."""
    out = rows.new_zeros(blocks.number * BLOCK + 1, rows.shape[1])
    return out.index_copy_(0, blocks.place.clamp(max=blocks.number * BLOCK), rows)[:-1].view(blocks.number, BLOCK, -1)


def blocked_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, D], weight [E, D, W] -> [R, W], zeros in rows of no expert. Matrices are fetched for as many blocks at a
    time as there are experts: no more memory than the weight itself."""
    blocks = blocks_of(rows.shape[0], ends)
    laid, step = _laid_out(rows, blocks), weight.shape[0]
    met = zip(laid.split(step), blocks.expert.split(step))
    flat = torch.cat([torch.bmm(part, weight[experts]) for part, experts in met]).view(-1, weight.shape[2])
    flat = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
    return flat.index_select(0, blocks.place)


def blocked_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left [R, M], right [R, N] -> left^T @ right, expert by expert [E, M, N], summed in fp32 at least."""
    blocks, step = blocks_of(left.shape[0], ends), ends.numel()
    a, b = _laid_out(left, blocks).transpose(1, 2), _laid_out(right, blocks)
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    out = torch.zeros(step, left.shape[1], right.shape[1], dtype=wide, device=left.device)
    for at in range(0, blocks.number, step):
        out.index_add_(0, blocks.expert[at : at + step], torch.bmm(a[at : at + step], b[at : at + step]).to(wide))
    return out.to(torch.promote_types(left.dtype, right.dtype))
