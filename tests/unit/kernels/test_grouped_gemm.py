"""The grouped product against its definition, expert by expert, and against autograd's own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.kernels.grouped_gemm import grouped_linear, of_somebody

CASES = {
    "even": ([3, 3, 3], 0),
    "uneven": ([5, 1, 7, 2], 0),
    "first_and_last_empty": ([0, 4, 0, 3, 0], 0),
    "one_expert": ([6], 0),
    "all_to_one": ([0, 0, 9], 0),
    "rows_of_nobody": ([2, 0, 3], 4),
    "nobody_at_all": ([0, 0], 3),
    "no_rows": ([0, 0, 0], 0),
}


def make(sizes: list[int], spare: int, inner: int = 5, outer: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows = torch.randn(sum(sizes) + spare, inner, requires_grad=True)
    weight = torch.randn(len(sizes), outer, inner, requires_grad=True)
    return rows, weight, torch.tensor(sizes).cumsum(0).to(torch.int32)


def one_by_one(rows: torch.Tensor, weight: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    out = torch.zeros(rows.shape[0], weight.shape[1])
    pieces, start = [], 0
    for expert, size in enumerate(sizes):
        pieces.append(rows[start : start + size] @ weight[expert].t())
        start += size
    return torch.cat([*pieces, out[start:]])


@pytest.mark.parametrize("case", CASES)
def test_each_row_meets_its_own_experts_weight_and_rows_of_nobody_are_zero(case: str) -> None:
    sizes, spare = CASES[case]
    rows, weight, ends = make(sizes, spare)
    out = grouped_linear(rows, weight, ends)
    assert out.shape == (sum(sizes) + spare, 7)
    torch.testing.assert_close(out, one_by_one(rows, weight, sizes), atol=1e-6, rtol=0)
    assert not out[sum(sizes) :].any()


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_rows_and_weights_are_those_of_the_definition(case: str) -> None:
    sizes, spare = CASES[case]
    rows, weight, ends = make(sizes, spare)
    upstream = torch.randn(rows.shape[0], 7)
    got = torch.autograd.grad(grouped_linear(rows, weight, ends), (rows, weight), upstream)
    want = torch.autograd.grad(one_by_one(rows, weight, sizes), (rows, weight), upstream, materialize_grads=True)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert not got[1][[i for i, n in enumerate(sizes) if n == 0]].any()  # an expert nobody chose learns nothing


class Products(TorchDispatchMode):
    """The shapes of all matrix products computed under it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_forms_no_gradient_and_keeps_no_rows_for_one(frozen: bool) -> None:
    """Rows are kept for the backward pass only to form a weight's gradient."""
    rows, weight, ends = make([5, 1, 6, 2], 0)
    weight.requires_grad_(not frozen)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = grouped_linear(rows, weight, ends)
    with Products() as backward:
        out.sum().backward()
    assert rows.grad is not None
    assert (weight.grad is None) == frozen
    of_rows = [t for t in kept if t.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()]
    of_weights = [shape for shape in backward.shapes if shape in ((7, 5), (5, 7), (4, 7, 5), (4, 5, 7))]
    assert bool(of_rows) is bool(of_weights) is not frozen


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
@pytest.mark.parametrize("case", CASES)
def test_torchs_kernel_equals_the_definition_on_a_gpu(case: str) -> None:
    sizes, spare = CASES[case]
    rows, weight, ends = make(sizes, spare, inner=32, outer=48)
    on = [t.detach().cuda().bfloat16().requires_grad_() for t in (rows, weight)]
    there = ends.cuda()
    out = of_somebody(grouped_linear(of_somebody(on[0], there), on[1], there), there)
    want = one_by_one(*(t.detach().cpu().float() for t in on), sizes)
    assert not out[sum(sizes) :].any()
    torch.testing.assert_close(out.float().cpu(), want, atol=0.05, rtol=0.02)  # one rounding of sums of 32 to bf16
    out.backward(torch.ones_like(out))
    assert on[0].grad[sum(sizes) :].abs().sum() == 0
    assert all(t.grad.isfinite().all() for t in on)


def test_widths_the_kernel_cannot_load_are_computed_all_the_same() -> None:
    """Rank 3 in 16 bit is 6 bytes a row: not a multiple of 16, so the definition is used."""
    rows, weight, ends = make([2, 3], 1, inner=3, outer=3)
    out = grouped_linear(rows.bfloat16(), weight.bfloat16(), ends)
    want = F.linear(rows[:2].bfloat16(), weight[0].bfloat16())
    assert torch.equal(out[:2], want)
