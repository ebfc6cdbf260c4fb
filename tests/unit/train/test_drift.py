"""Fingerprints of tensors and the words for what differs; real ranks are in tests/distributed/test_guards.py."""

from __future__ import annotations

import sys

import pytest
import torch

from erniekit.parallel.layout import Layout
from erniekit.parallel.plan import experts_in, heads, vocab
from erniekit.parallel.sharding import Heads, Sharding
from erniekit.train import drift
from erniekit.train.drift import ReplicaDrift, ReplicasDiffer, describe, fingerprint, fingerprints, replicated

SIZES = [0, 1, 3, 4, 5, 8, 63, 64, 1000]


def by_hand(tensor: torch.Tensor, chunk: int) -> int:
    """The definition in Python's integers, which never overflow."""
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], sys.byteorder, signed=True) for i in range(0, len(raw), 4)]
    weights, total = drift._weights(tensor.device)[:chunk].tolist(), 0
    for start in range(0, len(words), chunk):
        part = sum(word * weight for word, weight in zip(words[start : start + chunk], weights))
        total = (total * drift._ODD + part) % 2**64
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64])
def test_a_fingerprint_is_the_weighted_sum_of_words_whatever_the_type_and_size(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        tensor = (torch.randn(size, generator=generator) * 50).to(dtype)
        assert int(fingerprint(tensor, chunk=16)) % 2**64 == by_hand(tensor, 16)


def test_every_single_bit_counts() -> None:
    tensor = torch.randn(7, 5, dtype=torch.float32)
    plain = int(fingerprint(tensor))
    bits = tensor.view(torch.int32)
    seen = {plain}
    for row in range(7):
        for bit in range(32):
            flip = (1 << bit) if bit < 31 else -(1 << 31)
            bits[row, row % 5] ^= flip
            seen.add(int(fingerprint(tensor)))
            bits[row, row % 5] ^= flip
    assert len(seen) == 1 + 7 * 32
    assert int(fingerprint(tensor)) == plain


def test_signs_that_flip_in_pairs_and_changes_that_add_up_to_nothing_are_seen() -> None:
    tensor = torch.ones(64)
    plain = int(fingerprint(tensor))
    for a in range(64):
        for b in range(a):
            flipped = tensor.clone()
            flipped[[a, b]] *= -1
            assert int(fingerprint(flipped)) != plain
    bits = tensor.view(torch.int32)
    bits[10:13] += torch.tensor([1, -2, 1], dtype=torch.int32)
    assert int(fingerprint(tensor)) != plain


def test_order_counts_and_so_do_the_bits_a_float_comparison_ignores() -> None:
    a = torch.arange(64, dtype=torch.float32)
    assert int(fingerprint(a)) != int(fingerprint(a.flip(0)))
    assert int(fingerprint(torch.tensor([0.0, 1.0]))) != int(fingerprint(torch.tensor([-0.0, 1.0])))
    nan = torch.tensor([float("nan"), 2.0])
    assert int(fingerprint(nan)) == int(fingerprint(nan.clone()))


def test_slices_and_transposed_tensors_are_read_in_their_own_order() -> None:
    a = torch.randn(9, 7)
    assert int(fingerprint(a.t())) == int(fingerprint(a.t().contiguous()))
    assert int(fingerprint(a[1:, 1:])) == int(fingerprint(a[1:, 1:].clone()))
    flat = torch.randn(17)
    assert int(fingerprint(flat[1:])) == int(fingerprint(flat[1:].clone()))
    half = torch.randn(18, dtype=torch.float32).to(torch.bfloat16)
    assert int(fingerprint(half[1:-1])) == int(fingerprint(half[1:-1].clone())), "not aligned to four bytes"
    parameter = torch.nn.Parameter(flat)
    assert fingerprints([("p", parameter)]) == {"p": int(fingerprint(flat))}
    assert fingerprints([]) == {}


def test_the_minority_is_named_with_its_first_tensor() -> None:
    same = {"embed.weight": 1, "norm.weight": 2, "head.weight": 3}
    held = [(0, same), (2, same), (4, {**same, "norm.weight": 7, "head.weight": 8}), (6, same)]
    assert describe(held) == ("rank 4 differs from ranks 0, 2, 6", "norm.weight and 1 more")
    assert describe([*held, (8, {**same, "embed.weight": 9})])[0] == "ranks 4, 8 differ from ranks 0, 2, 6"


def test_two_against_each_other_are_both_named() -> None:
    who, tensors = describe([(0, {"w": 1}), (1, {"w": 2})])
    assert who == "ranks 0, 1 differ, with no majority to say which is right"
    assert tensors == "w"


def sharding(layout: Layout, tied: bool = False) -> Sharding:
    """Two layers of a norm, a qkv of 4 query and 1 kv heads of 8, and a vocabulary."""
    shapes = {"embed.weight": (64, 16)}
    for i in range(2):
        shapes |= {f"layers.{i}.attn_norm.weight": (16,), f"layers.{i}.attn.qkv.weight": (48, 16)}
    plan = {"embed": vocab(), "layers.*.attn.qkv": heads()}
    return Sharding(shapes, plan, Heads(4, 1, 8), layout, num_layers=2, tied=tied, part_rows={})


def blocks(layout: Layout, rank: int, tied: bool = False) -> dict[str, tuple[int, ...]]:
    return {str(block): block.ranks for block in replicated(sharding(layout, tied), rank)}


def test_data_parallel_ranks_share_everything_and_sharded_ones_nothing() -> None:
    found = blocks(Layout(dp=3), 1)
    assert set(found) == set(sharding(Layout()).names())
    assert set(found.values()) == {(0, 1, 2)}
    assert blocks(Layout(fsdp=2), 0) == {}
    assert blocks(Layout(), 0) == {}
    copies = blocks(Layout(dp=2, fsdp=2), 1)
    assert copies["embed.weight[32:64]"] == (1, 3), "the same shard in the other replica"


def test_dealt_experts_are_shared_only_with_their_copies() -> None:
    layout = Layout(dp=4, experts="data", ep=2)
    shapes = {"norm.weight": (8,), "layers.0.mlp.experts.down.weight": (6 * 8, 4)}
    parts = {"layers.0.mlp.experts.down": (("down_proj", 8),)}
    table = Sharding(shapes, {"*.experts.down": experts_in()}, Heads(2, 1, 4), layout, 1, False, parts)
    found = {str(block): block.ranks for block in replicated(table, 1)}
    assert found == {"norm.weight": (0, 1, 2, 3), "layers.0.mlp.experts.down.weight[24:48]": (1, 3)}


def test_tensor_parallel_ranks_share_norms_and_the_kv_head_both_need() -> None:
    found = blocks(Layout(tp=2), 0)
    assert found["layers.0.attn_norm.weight"] == (0, 1)
    assert found["layers.0.attn.qkv.weight[32:40]"] == (0, 1), "the key head"
    assert found["layers.0.attn.qkv.weight[40:48]"] == (0, 1), "the value head"
    assert "layers.0.attn.qkv.weight[0:16]" not in found, "queries of its own"
    assert "embed.weight[0:32]" not in found


def test_tied_embeddings_on_two_stages_are_copies_of_each_other() -> None:
    assert blocks(Layout(pp=2), 0) == {}
    assert blocks(Layout(pp=2), 0, tied=True) == {"embed.weight": (0, 1)}
    assert blocks(Layout(pp=2, dp=2), 3, tied=True)["embed.weight"] == (0, 1, 2, 3)


def test_a_block_is_compared_where_it_lies_in_the_local_tensor() -> None:
    class Echo:
        rank, size = 0, 2

        def gather(self, value: object) -> list[object]:
            return [value, value]

    (norm, *_) = [b for b in replicated(sharding(Layout(tp=2)), 1) if b.name.endswith("1.attn_norm.weight")]
    key = next(b for b in replicated(sharding(Layout(tp=2)), 1) if "[32:40]" in str(b))
    local = torch.randn(32, 16)  # 16 rows of queries, 8 of keys, 8 of values
    tensors = {"layers.0.attn.qkv.weight": local, "layers.1.attn_norm.weight": torch.ones(16)}
    hook = ReplicaDrift([norm, key], lambda: tensors, Echo(), every=1)  # type: ignore[arg-type]
    (prints,) = hook._fingerprints().values()
    assert prints[str(key)] == int(fingerprint(local[16:24]))
    del tensors["layers.1.attn_norm.weight"]
    assert [*hook._fingerprints().values()] == [{str(key): prints[str(key)]}], "what does not train may be left out"
    hook.check(1)


class Apart:
    """Two ranks: what the other one holds has other bits."""

    rank, size = 0, 2

    def gather(self, value: dict) -> list[dict]:
        def other(held: object) -> object:
            return {name: n + 1 for name, n in held.items()} if isinstance(held, dict) else b"other"

        return [value, {key: other(held) for key, held in value.items()}]


@pytest.mark.parametrize(("layout", "first", "named"), [
    (Layout(tp=2), True, True), (Layout(tp=2), False, False), (Layout(dp=2), True, False),
])  # fmt: skip
def test_copies_of_tensor_parallel_ranks_that_differ_from_the_first_step_on_may_be_the_plans_fault(
    layout: Layout, first: bool, named: bool
) -> None:
    (norm,) = (b for b in replicated(sharding(layout), 0) if b.name == "layers.0.attn_norm.weight")
    hook = ReplicaDrift([norm], lambda: {norm.name: torch.ones(16)}, Apart(), every=1)  # type: ignore[arg-type]
    hook.checks = 0 if first else 3
    with pytest.raises(ReplicasDiffer) as caught:
        hook.check(5)
    assert ("sharding table" in caught.value.fix) == named
    assert caught.value.fix.endswith("test memory and links of that machine; the same command resumes from the last "
                                     "checkpoint")  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
def test_a_card_and_a_cpu_make_the_same_fingerprint() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(3_000_001, generator=generator).to(dtype)
        assert int(fingerprint(tensor.cuda())) == int(fingerprint(tensor))
