"""Sorting tokens by expert and back: against plain indexing, values and gradients, on odd sizes."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.moe_permute import by_expert, combine, count, gather, weights_of_rows

SIZES = [(1, 1, 3, 1), (7, 2, 5, 4), (13, 3, 4, 9), (32, 6, 64, 16)]  # tokens, choices, width, experts


def choices(tokens: int, k: int, experts: int, dropped: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, max(experts, k), generator=generator)
    ids = scores.topk(k, dim=-1).indices.clamp(max=experts - 1)
    if dropped:
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, experts, ids)
    return ids


@pytest.mark.parametrize(("tokens", "k", "width", "experts"), SIZES)
@pytest.mark.parametrize("dropped", [False, True])
def test_rows_are_sorted_by_expert_and_tokens_keep_their_order(
    tokens: int, k: int, width: int, experts: int, dropped: bool
) -> None:
    ids = choices(tokens, k, experts, dropped)
    order = by_expert(ids, experts)
    flat = ids.flatten()
    want = sorted(range(tokens * k), key=lambda row: int(flat[row]))  # Python's sort is stable
    assert order.row_of.tolist() == want
    assert order.place_of[order.row_of].tolist() == list(range(tokens * k))
    held = torch.bincount(flat, minlength=experts + 1)[:experts]
    assert order.ends.dtype == torch.int32
    assert order.ends.tolist() == held.cumsum(0).tolist()
    assert count(ids, experts).tolist() == held.tolist()


@pytest.mark.parametrize(("tokens", "k", "width", "experts"), SIZES)
@pytest.mark.parametrize("dropped", [False, True])
def test_gather_and_combine_have_the_values_and_gradients_of_plain_indexing(
    tokens: int, k: int, width: int, experts: int, dropped: bool
) -> None:
    torch.manual_seed(1)
    order = by_expert(choices(tokens, k, experts, dropped), experts)
    order = order._replace(row_of=order.row_of[: int(order.ends[-1])])  # dropped ones have no row
    x = torch.randn(tokens, width, requires_grad=True)
    weights = torch.rand(tokens, k, requires_grad=True)
    upstream, bend = torch.randn(tokens, width), torch.randn(len(order.row_of), width)

    def ours() -> torch.Tensor:
        return combine(gather(x, order, k) * bend * weights_of_rows(weights, order), order, k)

    def plain() -> torch.Tensor:
        rows = x[order.row_of // k] * bend
        back = torch.zeros(tokens * k, width).index_copy(0, order.row_of, rows)
        return (back.view(tokens, k, width) * weights[..., None]).sum(1)

    torch.testing.assert_close(ours(), plain(), atol=1e-6, rtol=1e-6)
    got, want = (torch.autograd.grad(f(), (x, weights), upstream) for f in (ours, plain))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_combining_frozen_rows_gives_gradients_to_the_weights_alone() -> None:
    order = by_expert(choices(7, 2, 4), 4)
    rows, weights = torch.randn(14, 5), torch.rand(7, 2, requires_grad=True)
    combine(rows * weights_of_rows(weights, order), order, 2).sum().backward()
    torch.testing.assert_close(weights.grad, rows[order.place_of].view(7, 2, 5).sum(-1), atol=1e-5, rtol=0)
    assert rows.grad is None


def test_combining_16_bit_rows_sums_in_fp32() -> None:
    """256 + 1 + 1 + 1 + 1: sums in bf16 would lose every one."""
    order = by_expert(torch.tensor([[0, 1, 2, 3, 4]]), 5)
    rows = torch.tensor([[256.0], [1], [1], [1], [1]], dtype=torch.bfloat16)
    assert combine(rows, order, 5).item() == 260
