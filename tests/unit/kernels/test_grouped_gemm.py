"""Grouped products and their gradients against the definition, expert by expert."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.grouped_gemm import grouped_outer, grouped_product

CASES = {
    "even": ([3, 3, 3], 0),
    "uneven": ([5, 1, 7, 2], 0),
    "first_and_last_empty": ([0, 4, 0, 3, 0], 0),
    "one_expert": ([6], 0),
    "all_to_one": ([0, 0, 9], 0),
    "rows_of_no_expert": ([2, 0, 3], 4),
    "rows_of_no_expert_alone": ([0, 0], 3),
    "no_rows": ([0, 0, 0], 0),
}


def make(sizes: list[int], spare: int, inner: int = 5, outer: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows, other = torch.randn(sum(sizes) + spare, inner), torch.randn(sum(sizes) + spare, outer)
    return rows, torch.randn(len(sizes), inner, outer), other, torch.tensor(sizes).cumsum(0).to(torch.int32)


def one_by_one(rows: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    product = torch.zeros(rows.shape[0], weight.shape[2])
    outer, start = torch.zeros(len(sizes), rows.shape[1], other.shape[1]), 0
    for expert, size in enumerate(sizes):
        mine = slice(start, start + size)
        product[mine] = rows[mine] @ weight[expert]
        outer[expert] = rows[mine].t() @ other[mine]
        start += size
    return [product, outer]


@pytest.mark.parametrize("case", CASES)
def test_each_row_meets_its_own_experts_weight_and_rows_of_no_expert_are_zero(case: str) -> None:
    sizes, spare = CASES[case]
    rows, weight, other, ends = make(sizes, spare)
    product, outer = one_by_one(rows, weight, other, sizes)
    torch.testing.assert_close(grouped_product(rows, weight, ends), product, atol=1e-5, rtol=0)
    torch.testing.assert_close(grouped_outer(rows, other, ends), outer, atol=1e-5, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("inner", "width"), [(32, 48), (3, 48), (32, 5), (7, 9)])
def test_torchs_kernel_equals_the_definition_on_a_card_for_any_width(case: str, inner: int, width: int) -> None:
    """Rank 3 in 16 bit is 6 bytes a row, which no tile can load: padded. Nothing waits for the ends."""
    sizes, spare = CASES[case]
    rows, weight, other, ends = make(sizes, spare, inner, width)
    on = [t.cuda().bfloat16() for t in (rows, weight, other)]
    there, known = ends.cuda(), sum(sizes)
    want = one_by_one(*(t.float().cpu() for t in on), sizes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [grouped_product(on[0], on[1], there), grouped_outer(on[0], on[2], there)] if known + spare else None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if got is not None:
        torch.testing.assert_close(got[0].float().cpu()[:known], want[0][:known], atol=0.05, rtol=0.02)
        torch.testing.assert_close(got[1].float().cpu(), want[1], atol=0.05, rtol=0.02)
