"""Boxes as pure data: for any layout they cover every tensor exactly once, and local pieces are full."""

from __future__ import annotations

import pytest
import torch

from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.parallel.layout import Layout
from erniekit.parallel.plan import head_share, share
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.sharding_table import sharding_of

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


def check_holders(table: Sharding) -> None:
    for name in table.names():
        seen = torch.zeros(table.shape(name), dtype=torch.int64)
        for rank, boxes in table.holders(name):
            local = torch.zeros(table.local_shape(name, rank), dtype=torch.int64)
            for box in boxes:
                seen[box.global_slices] += 1
                local[box.local_slices] += 1  # in range, or this raises or leaves the shapes apart
                assert seen[box.global_slices].shape == local[box.local_slices].shape
        assert bool((seen == 1).all()), name


def check_boxes(table: Sharding) -> None:
    for name in table.names():
        for rank in range(table.layout.size):
            if not table.holds(name, rank):
                assert table.boxes(name, rank) == ()
                continue
            local = torch.zeros(table.local_shape(name, rank), dtype=torch.int64)
            for box in table.boxes(name, rank):
                local[box.local_slices] += 1
            assert bool((local == 1).all()), (name, rank)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
@pytest.mark.parametrize(("heads", "tied"), [((5, 1), True), ((20, 4), False), ((4, 4), True)])
def test_holders_have_every_element_exactly_once(layout: Layout, heads: tuple[int, int], tied: bool) -> None:
    check_holders(sharding(layout, heads, tied))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_a_ranks_boxes_fill_its_local_tensor(layout: Layout) -> None:
    check_boxes(sharding(layout))


EXPERT_LAYOUTS = [
    Layout(),
    Layout(tp=3),
    Layout(tp=4, experts="tp"),
    Layout(tp=2, fsdp=2, cp=2, experts="tp"),
    Layout(dp=4, experts="data"),
    Layout(dp=4, experts="data", ep=2),
    Layout(fsdp=4, experts="data", ep=2),
    Layout(dp=2, fsdp=3, experts="data", ep=3, tp=2),
    Layout(dp=2, cp=2, tp=3, experts="data"),
    Layout(pp=2, fsdp=2, tp=2, experts="world", sequence_parallel=True),
    Layout(dp=2, tp=3, experts="world", ep=2, sequence_parallel=True),
]


def moe_sharding(layout: Layout, mtp: int = 1) -> Sharding:
    moe = MoEShape(experts=7, choices=2, width=11, shared_width=6, start=1, end=2)
    config = DecoderConfig(
        family="ernie4_5_moe", vocab_size=13, hidden_size=8, intermediate_size=10, num_layers=3, num_heads=2,
        num_kv_heads=1, head_dim=4, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True,
        max_positions=64, moe=moe, mtp_layers=mtp,
    )  # fmt: skip
    spec = MODELS.get("ernie4_5_moe")
    with torch.device("meta"):
        model = spec.build(config)
        inject(model, LoRASettings.resolve(rank=2), seed=0)
    return sharding_of(model, spec.plan, layout)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=lambda layout: layout.describe())
def test_experts_have_every_element_exactly_once_and_fill_their_ranks(layout: Layout) -> None:
    table = moe_sharding(layout)
    check_holders(table)
    check_boxes(table)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=lambda layout: layout.describe())
def test_a_ranks_twin_is_the_first_that_holds_the_same(layout: Layout) -> None:
    table = moe_sharding(layout)
    for name in ("layers.1.mlp.experts.down.weight", "layers.1.mlp.experts.gate_up.lora.up_proj.B", "norm.weight"):
        boxes = [table.boxes(name, rank) for rank in range(layout.size)]
        for rank in range(layout.size):
            twin = table.twin(name, rank)
            assert twin <= rank
            assert boxes[twin] == boxes[rank]


def test_whole_experts_go_to_ranks_and_no_expert_is_on_two() -> None:
    table = moe_sharding(Layout(dp=2, tp=2, experts="data"))
    name = "layers.1.mlp.experts.gate_up.weight"
    each = 2 * 11
    rows = {
        rank: {r for b in table.boxes(name, rank) for r in range(*b.global_slices[0].indices(999))} for rank in range(4)
    }
    assert {r // each for r in rows[0] | rows[1]} == {0, 1, 2, 3}, "7 experts: the first rank has one more"
    assert {r // each for r in rows[2] | rows[3]} == {4, 5, 6}
    assert not rows[0] & rows[1], "tensor-parallel ranks cut each of them"


def test_layers_that_predict_further_tokens_are_on_the_last_stage() -> None:
    table = moe_sharding(Layout(pp=2, virtual_stages=1))
    names = [n for n in table.names() if n.startswith("mtp.")]
    assert names
    assert {table.pp_ranks_of(n) for n in names} == {(1,)}


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


def test_the_shapes_of_a_matrix_on_all_ranks_are_known_to_each() -> None:
    """So that all of them decide alike how a weight is stored."""
    table = sharding(Layout(tp=3, fsdp=2))
    assert table.matrix_shapes("layers.0.mlp.gate_up.weight") == {(16, 16), (14, 16)}, "2 x 22 rows over three ranks"
    assert table.matrix_shapes("layers.0.mlp.down.weight") == {(16, 8), (16, 7)}
    experts = "layers.1.mlp.experts"
    dealt = moe_sharding(Layout(dp=2, experts="data"))
    assert dealt.matrix_shapes(f"{experts}.gate_up.weight") == {(22, 8)}, "of one expert, however many a rank has"
    cut = moe_sharding(Layout(tp=2))
    assert cut.matrix_shapes(f"{experts}.gate_up.weight") == {(12, 8), (10, 8)}
    assert cut.matrix_shapes(f"{experts}.down.weight") == {(8, 6), (8, 5)}
    assert cut.cuts_columns(f"{experts}.down.weight", 1)
    assert not cut.cuts_columns(f"{experts}.gate_up.weight", 1)


def test_a_packed_weight_is_whole_where_others_are_sharded() -> None:
    table, name = sharding(Layout(fsdp=2)), "layers.0.attn.out.weight"
    assert table.local_shape(name, 0)[0] == 8
    table.packed.add(name)
    assert table.local_shape(name, 1) == table.shape(name)
    assert [box.global_slices[0] for box in table.boxes(name, 1)] == [slice(0, 16)]
