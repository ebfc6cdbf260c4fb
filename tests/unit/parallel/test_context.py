"""Sequences cut over ranks: what each rank has of a batch, and attention equal to that of one process."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from erniekit.data.types import IGNORE, Batch, Future, Pairs, SharedKeys
from erniekit.kernels.attention import reference
from erniekit.kernels.packed_attention import packs_of
from erniekit.models.layers.attention import InnerAttention
from erniekit.parallel.context import KeysOfAll, chunks_of, in_order, split, take
from support.ranks import Ranks

LENGTH = 32
# Rows of pairs as (prompt tokens both answers share, chosen, rejected); what is left of a row is padding.
SHARED = {
    "one pair": [[(9, 11, 12)]],
    "several pairs": [[(3, 2, 4), (7, 5, 1), (1, 1, 1)], [(0, 4, 3), (17, 2, 3)]],
    "one-token answers": [[(20, 1, 1), (4, 1, 3)]],
}


def bounds_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def batch_of(rows, share: bool = True) -> Batch:
    """Documents are prompt + chosen | rejected | ...; without `share` every one sees itself alone."""
    sizes, keys = [], []
    for number, row in enumerate(rows):
        at = number * LENGTH
        for prompt, chosen, rejected in row:
            middle = at + prompt + chosen
            keys += [range(at, middle), [*range(at, at + prompt), *range(middle, middle + rejected)]]
            sizes += [prompt + chosen, rejected]
            at = middle + rejected
        if at < (number + 1) * LENGTH:
            sizes.append((number + 1) * LENGTH - at)
            keys.append(range(at, (number + 1) * LENGTH))
    shape, counts = (len(rows), LENGTH), [len(k) for k in keys]
    shared = SharedKeys(torch.tensor([i for k in keys for i in k]), bounds_of(counts), max(counts)) if share else None
    token = torch.arange(len(rows) * LENGTH).view(shape)
    return Batch(
        token, token + 1, token % LENGTH, bounds_of(sizes), max(sizes), 0, shared=shared,
        real=token % 3 > 0, pairs=Pairs(token % 5 - 1, 2, torch.ones(2)),
        future=Future(torch.stack((token + 1, token + 2), -1), torch.stack((token + 3, token - 4), -1)),
    )  # fmt: skip


def test_a_split_batch_has_this_ranks_part_of_every_field():
    batch = batch_of(SHARED["several pairs"])
    for rank in range(2):
        mine = split(batch, rank, 2)
        at = torch.tensor([c * 8 + i for c in chunks_of(rank, 2) for i in range(8)])
        for name in ("input_ids", "labels", "positions", "real"):
            assert torch.equal(getattr(mine, name), getattr(batch, name)[:, at]), name
        assert torch.equal(mine.pairs.segment, batch.pairs.segment[:, at])
        assert mine.pairs.count == batch.pairs.count
        assert torch.equal(mine.future.ids, batch.future.ids[:, at])
        assert torch.equal(mine.future.labels, batch.future.labels[:, at])


def test_a_batch_for_one_rank_stays_as_it_is():
    batch = batch_of(SHARED["one pair"])
    assert split(batch, 0, 1) is batch


def test_fields_that_are_not_there_stay_away():
    token = torch.zeros(1, LENGTH, dtype=torch.int64)
    mine = split(Batch(token, token + IGNORE, token, bounds_of([LENGTH]), LENGTH, 0), 1, 2)
    assert (mine.real, mine.pairs, mine.future) == (None, None, None)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("ranks_of_a_row", [2, 4])
@pytest.mark.parametrize("name", SHARED)
def test_each_piece_keeps_the_keys_its_last_token_sees(name, ranks_of_a_row, share):
    """Followed back through the joined parts: token t looks at exactly the tokens it looks at in one process."""
    batch = batch_of(SHARED[name], share)
    rows = batch.input_ids.shape[0]
    joined = torch.cat([take(batch.input_ids, r, ranks_of_a_row) for r in range(ranks_of_a_row)], 1).flatten()
    assert torch.equal(in_order(joined.view(rows, LENGTH), ranks_of_a_row), batch.input_ids)
    seen_by: dict[int, list[int]] = {}
    for rank in range(ranks_of_a_row):
        mine = split(batch, rank, ranks_of_a_row)
        starts, key_starts = mine.cu_seqlens.tolist(), mine.shared.bounds.tolist()
        assert max(b - a for a, b in pairwise(starts)) == mine.max_doc
        assert max(b - a for a, b in pairwise(key_starts)) == mine.shared.longest
        for s, (start, end) in enumerate(pairwise(starts)):
            keys = joined[mine.shared.index[key_starts[s] : key_starts[s + 1]]].tolist()
            for i, token in enumerate(mine.input_ids.flatten()[start:end].tolist()):
                seen_by[token] = keys[: len(keys) - (end - start - 1 - i)]
    starts = batch.cu_seqlens.tolist()
    for s, (start, end) in enumerate(pairwise(starts)):
        keys = list(range(start, end))
        if share:
            keys = batch.shared.index[batch.shared.bounds[s] : batch.shared.bounds[s + 1]].tolist()
        for token in range(start, end):
            assert seen_by[token] == keys[: len(keys) - (end - 1 - token)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("ranks_of_a_row", [2, 4])
def test_kernels_for_packs_get_lists_of_one_size_and_every_place_of_a_key_in_them(ranks_of_a_row, share):
    shapes = set()
    for name, rank in product(("one pair", "one-token answers"), range(ranks_of_a_row)):
        mine = split(batch_of(SHARED[name], share), rank, ranks_of_a_row)
        packs = packs_of(mine.cu_seqlens, mine.max_doc, mine.shared, mine.input_ids.numel())
        shapes.add(tuple(tuple(t.shape) for t in packs))
        listed = mine.shared.index.tolist()
        assert packs.key_index[: len(listed)].tolist() == listed
        for token, places in enumerate(packs.key_places.tolist()):
            assert [p for p in places if p >= 0] == [p for p, t in enumerate(listed) if t == token]
    assert len(shapes) == 1, "one program for every pack and rank"


def attend(
    name: str, share: bool, q_heads: int, kv_heads: int, backend: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradients of q, k, v: this rank's, and its part of those of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = batch_of(SHARED[name], share)
    generator = torch.Generator().manual_seed(0)
    rand = lambda heads: torch.randn(len(SHARED[name]), LENGTH, heads, 8, generator=generator)  # noqa: E731
    whole = [rand(n).requires_grad_() for n in (q_heads, kv_heads, kv_heads)]
    upstream = rand(q_heads)
    expected = reference(*whole, batch.cu_seqlens, batch.shared)
    expected.backward(upstream)
    mine = split(batch, rank, size)
    parts = [take(t.detach(), rank, size).requires_grad_() for t in whole]
    inner = InnerAttention()
    inner.backend, inner.all_keys = backend, KeysOfAll(dist.group.WORLD)
    out = inner(*parts, SimpleNamespace(cu_seqlens=mine.cu_seqlens, max_doc=mine.max_doc, shared=mine.shared))
    out.backward(take(upstream, rank, size))
    wanted = [take(t.detach(), rank, size) for t in (expected, *(w.grad for w in whole))]
    return list(zip([out.detach(), *(p.grad for p in parts)], wanted))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("count", [2, 4])
def test_attention_over_ranks_equals_one_process(ranks: Ranks, count: int, heads: tuple[int, int]):
    for name in SHARED:
        for share, backend in ((True, "auto"), (False, "auto"), (True, "reference")):
            for answer in ranks.run(count, attend, name, share, *heads, backend):
                for ours, theirs in answer:
                    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
