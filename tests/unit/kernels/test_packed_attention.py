"""What packed attention is told of a batch: fixed shapes, whatever documents come. The op itself needs a card
(tests/device/test_cuda_attention.py)."""

from __future__ import annotations

import pytest
import torch

from erniekit.data.types import SharedKeys
from erniekit.kernels import cudnn_packed
from erniekit.kernels.cudnn_packed import PackShape, bucket, offsets, offsets_fit, supported
from erniekit.kernels.packed_attention import ROOM, faster_attention, for_kernel, packs_of, places_of


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_packs_of_other_documents_have_the_same_shapes() -> None:
    few, many = packs_of(bounds(60, 40), 60, None, 100), packs_of(bounds(*[2] * 50), 2, None, 100)
    assert few.bounds.shape == many.bounds.shape == (ROOM + 1,)
    assert few.bounds.diff().tolist() == [60, 40, *[0] * (ROOM - 2)]
    assert few.sizes.tolist() == [2, 60, 60]
    assert packs_of(bounds(*[1] * (ROOM + 1)), 1, None, ROOM + 1).bounds.shape == (2 * ROOM + 1,)


def test_keys_that_documents_share_are_padded_past_the_last_list() -> None:
    shared = SharedKeys(torch.tensor([0, 1, 2, 0, 3]), bounds(3, 2), longest=3)
    packs = packs_of(bounds(3, 1), 3, shared, 4)
    assert packs.key_index is not None
    assert packs.key_bounds is not None
    assert packs.key_index.tolist() == [0, 1, 2, 0, 3, 0, 0, 0]
    assert packs.key_bounds[:3].tolist() == [0, 3, 5]
    assert set(packs.key_bounds[3:].tolist()) == {5}
    assert packs.key_places is not None
    assert packs.key_places.tolist() == [[0, 3], [1, -1], [2, -1], [4, -1]]


def test_places_say_where_in_the_lists_a_token_is_and_a_third_place_is_refused() -> None:
    assert places_of(torch.tensor([4, 0, 2, 0, 4]), 6).tolist() == [
        [1, 3],
        [-1, -1],
        [2, -1],
        [-1, -1],
        [0, 4],
        [-1, -1],
    ]
    with pytest.raises(IndexError):
        places_of(torch.tensor([0, 0, 0]), 1)


def test_there_is_no_kernel_for_what_is_not_on_a_card() -> None:
    assert for_kernel(bounds(4), 4, None, torch.arange(4), 8, 128) == (None, None)


def test_sizes_round_up_by_a_quarter_at_most_and_never_past_the_pack() -> None:
    for size in range(1, 9000, 7):
        got = bucket(size, 8, 10**9)
        assert size <= got <= max(8, size * 1.25 + 8)
    assert bucket(5000, 512, 4999) == 4999
    assert len({bucket(n, 512, 1 << 17) for n in range(1, 1 << 17)}) < 40


def test_only_a_hopper_card_without_flash4_and_a_newer_one_without_cudnn_are_told_what_to_install() -> None:
    assert "erniekit-torch[flash4]" in (faster_attention((9, 0), False, True) or "")
    assert "erniekit-torch[cudnn]" in (faster_attention((10, 0), True, False) or "")
    for card in (((9, 0), True, False), ((8, 0), False, False), ((10, 0), False, True)):
        assert faster_attention(*card) is None


def long_pack(tokens: int, q_width: int = 64 * 128, kv_width: int = 1024, keys: int = 0) -> PackShape:
    """64 heads of 128 channels."""
    return PackShape(8, tokens, tokens, tokens, keys or tokens, 64, 8, 128, q_width, kv_width, torch.bfloat16, False)


@pytest.mark.parametrize(
    ("largest", "more"),
    [
        (2**31 // 8192 - 1, {}),
        (2**31 // 10240 - 1, dict(q_width=10240)),  # one row of a fused projection
        (2**31 // 16384 - 1, dict(kv_width=16384)),
    ],
)
def test_cudnn_is_not_given_a_pack_whose_offsets_overflow(
    largest: int, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in ("forward_plan", "backward_plan"):  # a card's: any shape has one
        monkeypatch.setattr(cudnn_packed, plan, lambda shape, device: None)
    fits, beyond = long_pack(largest, **more), long_pack(largest + 2, **more)
    assert offsets_fit(fits)
    assert not offsets_fit(beyond)
    device = torch.device("cpu")
    assert supported(fits, device)
    assert not supported(beyond, device)
    for shape, right in ((fits, True), (beyond, False)):
        where = offsets(bounds(*[0] * 7, shape.tokens), None, shape)
        last = [int(t[-1]) for t in (where.q, where.kv, where.out, where.stats)]
        exact = [shape.tokens * n for n in (shape.q_width, shape.kv_width, shape.heads * shape.head_dim, shape.heads)]
        assert (last == exact) is right


def test_a_list_of_keys_may_be_longer_than_the_tokens_and_counts_itself() -> None:
    assert offsets_fit(long_pack(200_000))
    assert not offsets_fit(long_pack(200_000, keys=400_000, kv_width=8192))
