"""Products in fp8 against their definition and against the numbers that were rounded."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import fp8_product as fp8

ERROR = 0.05  # of a product of normal numbers (norm): both sides keep 4 bits, which makes 3.7 %


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def by_expert(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    bounds = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ w.t() for a, b, w in zip(bounds, bounds[1:], weight)])


def test_each_row_fills_the_range_and_is_off_by_a_sixteenth_at_most() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 33) * torch.logspace(-20, 20, 15).view(3, 5, 1)
    x8, scale = fp8.quantised(x)
    assert (x8.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (x8.shape, scale.shape) == (x.shape, (3, 5, 1))
    assert torch.equal(x8.float().abs().amax(-1), torch.full((3, 5), 448.0))
    most = x.abs().amax(-1, keepdim=True)
    # half a step of a 4-bit number; below 2^-6 of 448's scale steps are of one size, 2^-9
    assert ((fp8.dequantised(x8, scale) - x).abs() <= (x.abs() / 16).maximum(most / 448 * 2**-10) * 1.001).all()


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 3], x[3, 3] = float("nan"), float("inf"), 1.0
    out = fp8.product(*fp8.quantised(x), *fp8.quantised(torch.ones(16, 16)))
    assert torch.equal(out[0], torch.zeros(16, dtype=torch.bfloat16))
    assert not out[1:3].isfinite().any()
    assert torch.equal(out[3], torch.ones(16, dtype=torch.bfloat16))


def test_products_are_those_of_the_rounded_numbers_and_near_those_of_the_given_ones() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(40, 96), torch.randn(64, 96) * torch.rand(64, 1)
    (x8, xs), (w8, ws) = fp8.quantised(x), fp8.quantised(weight)
    out = fp8.product(x8, xs, w8, ws, torch.float32)
    torch.testing.assert_close(out, (x8.float() * xs) @ (w8.float() * ws).t())
    assert 0.01 < apart(out, x @ weight.t()) < ERROR


def test_grouped_rows_meet_their_own_experts_and_nobodys_are_zeros() -> None:
    torch.manual_seed(2)
    ends = torch.tensor([5, 5, 22, 23], dtype=torch.int32)
    rows, weight = torch.randn(26, 32), torch.randn(4, 48, 32)
    held = fp8.fp8_weight(weight)
    out = fp8.grouped(*fp8.quantised(rows), held.rows, held.row_scale, ends, torch.float32)
    assert apart(out[:23], by_expert(rows, weight, ends)) < ERROR
    assert not out[23:].any()


def test_a_weight_is_held_along_both_of_its_sides_in_the_bytes_of_one_in_bf16() -> None:
    torch.manual_seed(3)
    weight = torch.randn(3, 48, 32)
    held = fp8.fp8_weight(weight)
    assert apart(fp8.dequantised(held.rows, held.row_scale), weight) < 0.03
    assert apart(fp8.dequantised(held.columns, held.column_scale), weight.transpose(1, 2)) < 0.03
    assert held.rows.nbytes + held.columns.nbytes == weight.bfloat16().nbytes
    one = fp8.fp8_weight(weight[1])
    assert all(torch.equal(a[1].float(), b.float()) for a, b in zip(held, one))


@pytest.mark.parametrize("experts", [False, True])
def test_a_linear_and_its_gradient_go_through_fp8_both_ways(experts: bool) -> None:
    torch.manual_seed(4)
    ends = torch.tensor([3, 10], dtype=torch.int32) if experts else None
    x = torch.randn(*((10,) if experts else (2, 5)), 32, requires_grad=True)
    weight = torch.randn(*((2,) if experts else ()), 48, 32)
    grad = torch.randn(*x.shape[:-1], 48)
    held = fp8.fp8_weight(weight)
    y = fp8.fp8_linear(x, held, ends)
    (dx,) = torch.autograd.grad(y, x, grad)
    x32 = x.detach().requires_grad_()
    want = x32 @ weight.t() if ends is None else by_expert(x32, weight, ends)
    (want_dx,) = torch.autograd.grad(want, x32, grad)
    assert y.shape == want.shape
    assert apart(y, want) < ERROR
    assert apart(dx, want_dx) < ERROR
    assert apart(dx, want_dx) > 0.01, "it was multiplied in fp32"


def test_the_linear_is_an_op_that_compiled_layers_hold() -> None:
    torch.manual_seed(5)
    x, held = torch.randn(2, 4, 32, requires_grad=True), fp8.fp8_weight(torch.randn(48, 32))
    checks = ("test_faketensor", "test_autograd_registration")  # its other checks cannot compare fp8 numbers
    torch.library.opcheck(torch.ops.erniekit.fp8_linear.default, (x, *held, None), test_utils=checks)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return fp8.fp8_linear(torch.tanh(x), held).pow(2).sum()

    (want,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    assert torch.equal(got, want)


def test_a_cpu_runs_it_and_other_devices_say_why_not() -> None:
    assert fp8.why_not(torch.device("cpu"), experts=True) is None
    assert "NVIDIA" in (fp8.why_not(torch.device("mps"), experts=False) or "")


def test_only_widths_the_cards_kernels_load_are_taken() -> None:
    assert [fp8.fits(torch.empty(shape)) for shape in ((48, 32), (4, 48, 32))] == [True, True]
    assert [fp8.fits(torch.empty(shape)) for shape in ((40, 32), (48, 8), (4, 40, 32))] == [False] * 3
