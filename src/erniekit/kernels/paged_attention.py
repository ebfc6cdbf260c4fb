"""Attention over keys and values that lie in blocks of a shared pool, and storing a step's keys and values there.

Called by serve/engines. A sequence is a row of `tables`, which lists its blocks; a token sees the places of its own
sequence up to its own. Nothing waits for the device and every shape is known before, so that a step can be recorded.
T tokens of a step, S sequences, M blocks of one, N heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from erniekit.kernels.rope import ROTATIONS
from erniekit.kernels.selection import PagedFacts, chosen


class PagedTokens(NamedTuple):
    """Where the tokens of a step belong."""

    rows: torch.Tensor  # int64 [T]: the sequence of each, a row of `tables`
    places: torch.Tensor  # int64 [T]: its place there
    tables: torch.Tensor  # int32 [S, M]
    size: int  # slots of a block

    def slots(self) -> torch.Tensor:
        """int64 [T]: the slot of each in the pool."""
        blocks = self.tables[self.rows, self.places // self.size].long()
        return blocks * self.size + self.places % self.size


class TurnAngles(NamedTuple):
    """The angles of all places, and each token's: they differ from its place behind pictures."""

    cos: torch.Tensor  # fp32 [places, D / 2]
    sin: torch.Tensor
    at: torch.Tensor  # int64 [T]
    halves: bool  # which channels form a pair


class Tiles(NamedTuple):
    """Chunks of prompts cut into tiles of consecutive tokens of one sequence; a tile of no tokens is left out."""

    firsts: torch.Tensor  # int32 [tiles]: the first token of each in the step
    counts: torch.Tensor  # int32 [tiles]: its tokens
    rows: int  # most tokens of a tile


def on_card(q: torch.Tensor, head_dim: int) -> bool:
    return chosen("paged attention", PagedFacts(q.device, q.dtype, head_dim)) == "triton"


def store_turned(
    qkv: torch.Tensor, where: PagedTokens, turns: TurnAngles, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """qkv [T, (N + 2 Nkv) * D] -> its queries, turned, [T, N, D]; keys, turned, and values go to their slots in the
    pool [slots, Nkv, D]."""
    if on_card(qkv, keys.shape[2]):
        from erniekit.kernels.triton import paged_attention as kernels

        return kernels.store_turned(qkv, where, turns, keys, values)
    return store_turned_reference(qkv, where, turns, keys, values)


def store_turned_reference(
    qkv: torch.Tensor, where: PagedTokens, turns: TurnAngles, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    _, kv_heads, D = keys.shape
    turn = ROTATIONS["halves" if turns.halves else "pairs"]
    cos, sin = (table[turns.at][:, None] for table in (turns.cos, turns.sin))
    q, k, v = qkv.unflatten(-1, (-1, D)).tensor_split([-2 * kv_heads, -kv_heads], dim=1)
    slots = where.slots()
    keys.index_copy_(0, slots, turn(k, cos, sin).to(keys.dtype))
    values.index_copy_(0, slots, v.to(values.dtype))
    return turn(q, cos, sin)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: PagedTokens, tiles: Tiles | None = None
) -> torch.Tensor:
    """q [T, N, D] -> [T, N, D]. tiles: of tokens that follow one another; None: each is of another sequence."""
    if on_card(q, q.shape[2]):
        from erniekit.kernels.triton import paged_attention as kernels

        if tiles is None:
            return kernels.attend_one(q, keys, values, where)
        return kernels.attend_tiles(q, keys, values, where, tiles)
    return attend_reference(q, keys, values, where)


def attend_reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: PagedTokens) -> torch.Tensor:
    """The definition: each token's sequence gathered from the pool."""
    offsets = torch.arange(where.size, device=q.device)
    slots = (where.tables[where.rows].long()[..., None] * where.size + offsets).flatten(1)  # [T, M * size]
    mask = torch.arange(slots.shape[1], device=q.device) <= where.places[:, None]
    # A NaN of another sequence would reach the result in spite of the mask.
    slots = torch.where(mask, slots, slots[:, :1])
    # index_select: several times quicker than keys[slots] on a CPU. -> [T, Nkv, M * size, D]
    near, far = (
        t.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2).to(q.dtype) for t in (keys, values)
    )
    return F.scaled_dot_product_attention(q[:, :, None], near, far, mask[:, None, None], enable_gqa=True)[:, :, 0]
