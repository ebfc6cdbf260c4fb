"""Attention over blocks of a pool: the definition against plain attention, the kernels against the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from erniekit.kernels.paged_attention import (
    PagedTokens,
    Tiles,
    TurnAngles,
    attend_reference,
    store_turned,
    store_turned_reference,
)
from erniekit.kernels.rope import cos_sin, inverse_frequencies

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.triton import paged_attention as kernels
from support.interpreted import bound_loops_by_numbers_on_the_device, patch_once_per_launch

bound_loops_by_numbers_on_the_device()
patch_once_per_launch()

SIZE, BLOCKS, D = 4, 40, 16


def pool(kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(BLOCKS * SIZE, kv_heads, D), torch.randn(BLOCKS * SIZE, kv_heads, D)


def tables(count: int, width: int) -> torch.Tensor:
    """Blocks in no order, none of two sequences."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))
    return order[: count * width].view(count, width).int()


def tokens_of(rows: list[int], places: list[int], sequences: int = 4, width: int = 10) -> PagedTokens:
    return PagedTokens(torch.tensor(rows), torch.tensor(places), tables(sequences, width), SIZE)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_token_sees_its_own_sequence_up_to_itself(heads: int, kv_heads: int) -> None:
    keys, values = pool(kv_heads)
    where = tokens_of([2, 0, 3], [17, 0, 39])
    q = torch.randn(3, heads, D)
    out = attend_reference(q, keys, values, where)
    for t, (row, place) in enumerate(zip(where.rows.tolist(), where.places.tolist())):
        slots = [int(where.tables[row, n // SIZE]) * SIZE + n % SIZE for n in range(place + 1)]
        k, v = (x[slots].transpose(0, 1)[None] for x in (keys, values))
        want = F.scaled_dot_product_attention(q[t][None, :, None], k, v, enable_gqa=True)
        torch.testing.assert_close(out[t], want[0, :, 0])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_one_token_of_each_sequence_by_the_kernel(heads: int, kv_heads: int, splits: int) -> None:
    keys, values = pool(kv_heads)
    where = tokens_of([1, 3, 0, 2], [0, 39, 7, 21])
    q = torch.randn(4, heads, D)
    found = kernels.attend_one(q, keys, values, where, splits)
    torch.testing.assert_close(found, attend_reference(q, keys, values, where))


def test_a_long_context_of_few_sequences_is_split_and_one_of_many_is_not() -> None:
    assert kernels.splits_for(1, 2, 2048) == 16
    assert kernels.splits_for(8, 2, 2048) == 16
    assert kernels.splits_for(64, 2, 2048) == 2
    assert kernels.splits_for(256, 4, 2048) == 1
    assert kernels.splits_for(1, 2, 64) == 1


def test_chunks_of_prompts_by_the_kernel() -> None:
    keys, values = pool(2)
    where = tokens_of([0] * 11 + [2] * 3 + [3], [*range(6, 17), 0, 1, 2, 0])
    tiles = Tiles(torch.tensor([0, 8, 11, 0], dtype=torch.int32), torch.tensor([8, 3, 3, 0], dtype=torch.int32), 8)
    q = torch.randn(15, 6, D)
    found = kernels.attend_tiles(q, keys, values, where, tiles)[:14]  # the last token is padding, of no tile
    torch.testing.assert_close(found, attend_reference(q, keys, values, where)[:14])


@pytest.mark.parametrize("halves", [False, True])
def test_keys_and_values_are_stored_where_the_tables_say_and_queries_are_turned(halves: bool) -> None:
    heads, kv_heads = 3, 2
    where = tokens_of([2, 0, 1], [17, 0, 39])
    cos, sin = (
        t[0, :, 0] for t in cos_sin(torch.arange(50)[None], inverse_frequencies(D, 1e4, None, where.rows.device))
    )
    turns = TurnAngles(cos, sin, torch.tensor([17, 5, 49]), halves)
    fused = torch.randn(3, (heads + 2 * kv_heads) * D)
    mine, wanted = pool(kv_heads), pool(kv_heads)
    found = kernels.store_turned(fused, where, turns, *mine)
    torch.testing.assert_close(found, store_turned_reference(fused, where, turns, *wanted))
    for here, there in zip(mine, wanted):
        torch.testing.assert_close(here, there)
    changed = (mine[1] != pool(kv_heads)[1]).any(-1).any(-1).nonzero().flatten().tolist()
    assert changed == sorted(where.slots().tolist())
    again = store_turned(fused, where, turns, *wanted)
    assert torch.equal(again, store_turned_reference(fused, where, turns, *wanted)), "a CPU takes the definition"
