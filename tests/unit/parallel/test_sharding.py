"""Boxes as pure data: for any layout they cover every tensor exactly once, and local pieces are full."""

from __future__ import annotations

import pytest
import torch

from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.parallel.apply import sharding_of
from erniekit.parallel.mesh import Layout
from erniekit.parallel.plan import head_share, share
from erniekit.parallel.sharding import Sharding

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=3),
    Layout(tp=8),
    Layout(fsdp=3),
    Layout(pp=3, virtual_stages=2),
    Layout(tp=4, fsdp=2, cp=2),
    Layout(pp=2, dp=2, fsdp=2, tp=3),
    Layout(pp=2, stage_cuts=(1,), tp=2),
]


def sharding(layout: Layout, heads: tuple[int, int] = (5, 1), tied: bool = True, lora: bool = True) -> Sharding:
    config = DecoderConfig(
        family="ernie4_5", vocab_size=37, hidden_size=16, intermediate_size=22, num_layers=6, num_heads=heads[0],
        num_kv_heads=heads[1], head_dim=4, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs",
        tie_word_embeddings=tied, max_positions=64, attention_bias=True, mlp_bias=True, head_bias=True,
    )  # fmt: skip
    spec = MODELS.get("ernie4_5")
    with torch.device("meta"):
        model = spec.build(config)
        if lora:
            inject(model, LoRASettings.resolve(rank=2), seed=0)
    return sharding_of(model, spec.plan, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
@pytest.mark.parametrize(("heads", "tied"), [((5, 1), True), ((20, 4), False), ((4, 4), True)])
def test_holders_have_every_element_exactly_once(layout: Layout, heads: tuple[int, int], tied: bool) -> None:
    table = sharding(layout, heads, tied)
    for name in table.names():
        seen = torch.zeros(table.shape(name), dtype=torch.int64)
        for rank, boxes in table.holders(name):
            local = torch.zeros(table.local_shape(name, rank), dtype=torch.int64)
            for box in boxes:
                seen[box.global_slices] += 1
                local[box.local_slices] += 1  # in range, or this raises or leaves the shapes apart
                assert seen[box.global_slices].shape == local[box.local_slices].shape
        assert bool((seen == 1).all()), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_a_ranks_boxes_fill_its_local_tensor(layout: Layout) -> None:
    table = sharding(layout)
    for name in table.names():
        for rank in range(layout.size):
            if not table.holds(name, rank):
                assert table.boxes(name, rank) == ()
                continue
            local = torch.zeros(table.local_shape(name, rank), dtype=torch.int64)
            for box in table.boxes(name, rank):
                local[box.local_slices] += 1
            assert bool((local == 1).all()), (name, rank)


def test_query_heads_always_come_with_the_kv_heads_they_look_at() -> None:
    for heads, kv in ((20, 4), (5, 1), (16, 2), (64, 8), (40, 40)):
        for ranks in (1, 2, 3, 5, 8, 16):
            shares = [head_share(heads, kv, ranks, r) for r in range(ranks)]
            assert [j for s in shares for j in range(*s.queries)] == list(range(heads))
            for one in shares:
                for local, query in enumerate(range(*one.queries)):
                    assert one.kvs[0] + one.kv_of[local] == query * kv // heads


def test_shares_are_as_even_as_can_be() -> None:
    sizes = [b - a for a, b in (share(20, 8, r) for r in range(8))]
    assert sizes == [3, 3, 3, 3, 2, 2, 2, 2]
