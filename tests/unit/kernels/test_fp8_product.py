"""Products in fp8 against their definition and against the numbers that were rounded."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import fp8_cards
from erniekit.kernels import fp8_product as fp8
from erniekit.kernels.linear import linear
from erniekit.kernels.quantised_rows import dequantised, quantised, quantised_by_expert, quantised_with
from erniekit.kernels.stored import Stored, kind_named, kind_of

ERROR = 0.05  # of a product of normal numbers (norm): both sides keep 4 bits, which makes 3.7 %


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def by_expert(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    bounds = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ w.t() for a, b, w in zip(bounds, bounds[1:], weight)])


def test_each_row_fills_the_range_and_is_off_by_a_sixteenth_at_most() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 33) * torch.logspace(-20, 20, 15).view(3, 5, 1)
    x8, scale = quantised(x)
    assert (x8.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (x8.shape, scale.shape) == (x.shape, (3, 5, 1))
    assert torch.equal(x8.float().abs().amax(-1), torch.full((3, 5), 448.0))
    most = x.abs().amax(-1, keepdim=True)
    # half a step of a 4-bit number; below 2^-6 of 448's scale steps are of one size, 2^-9
    assert ((dequantised(x8, scale) - x).abs() <= (x.abs() / 16).maximum(most / 448 * 2**-10) * 1.001).all()


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 3], x[3, 3] = float("nan"), float("inf"), 1.0
    out = fp8.product(*quantised(x), *quantised(torch.ones(16, 16)))
    assert torch.equal(out[0], torch.zeros(16, dtype=torch.bfloat16))
    assert not out[1:3].isfinite().any()
    assert torch.equal(out[3], torch.ones(16, dtype=torch.bfloat16))


def test_products_are_those_of_the_rounded_numbers_and_near_those_of_the_given_ones() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(40, 96), torch.randn(64, 96) * torch.rand(64, 1)
    (x8, xs), (w8, ws) = quantised(x), quantised(weight)
    out = fp8.product(x8, xs, w8, ws, torch.float32)
    torch.testing.assert_close(out, (x8.float() * xs) @ (w8.float() * ws).t())
    assert 0.01 < apart(out, x @ weight.t()) < ERROR


def packed(weight: torch.Tensor) -> Stored:
    if weight.dim() == 2:
        return kind_named("fp8").pack(weight)
    return kind_named("fp8").pack(weight.flatten(0, 1)).of_experts(weight.shape[0])


def test_grouped_rows_meet_their_own_experts_and_rows_of_no_expert_are_zeros() -> None:
    torch.manual_seed(2)
    ends = torch.tensor([5, 5, 22, 23], dtype=torch.int32)
    rows, weight = torch.randn(26, 32), torch.randn(4, 48, 32)
    held = packed(weight)
    out = fp8.grouped(*quantised(rows), held.data, held.scale, ends, torch.float32)
    assert apart(out[:23], by_expert(rows, weight, ends)) < ERROR
    assert not out[23:].any()


def test_a_weight_is_held_once_in_half_the_bytes_of_bf16() -> None:
    torch.manual_seed(3)
    weight = torch.randn(3, 48, 32)
    held = packed(weight)
    assert apart(kind_of(held).unpack(held, torch.float32), weight) < 0.03
    assert held.data.nbytes == weight.bfloat16().nbytes / 2
    one = packed(weight[1])
    assert torch.equal(held.data[1].float(), one.data.float())
    assert torch.equal(held.scale[1], one.scale)


@pytest.mark.parametrize("experts", [False, True])
def test_forward_and_backward_multiply_by_the_same_weight(experts: bool) -> None:
    """Against products with the unpacked weight only the rounding of rows is left, and nothing where the rows are
    numbers of fp8."""
    torch.manual_seed(4)
    ends = torch.tensor([3, 10], dtype=torch.int32)
    weight = torch.randn(*((2,) if experts else ()), 48, 32) * torch.logspace(-2, 2, 48)[:, None]
    held = packed(weight)
    kind, exact = kind_of(held), kind_of(held).unpack(held, torch.float32)
    x, grad = torch.randn(10, 32), torch.randn(10, 48)
    if experts:
        y, dx = kind.grouped(x, held, ends, torch.float32), kind.turned_grouped(grad, held, ends, torch.float32)
        want, want_dx = by_expert(x, exact, ends), by_expert(grad, exact.transpose(1, 2), ends)
    else:
        y, dx, want, want_dx = kind.product(x, held), kind.turned_product(grad, held), x @ exact.t(), grad @ exact
    assert 0.005 < apart(y, want) < 0.03
    assert 0.005 < apart(dx, want_dx) < 0.03
    whole = 448 * 2.0 ** -torch.randint(0, 5, (10, 32)) * torch.randint(-1, 2, (10, 32))  # numbers of fp8
    whole[:, 0] = 448
    got = kind.grouped(whole, held, ends, torch.float32) if experts else kind.product(whole, held)
    want = by_expert(whole, exact, ends) if experts else whole @ exact.t()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-2)


def test_factors_of_columns_go_into_rows_before_they_are_rounded() -> None:
    torch.manual_seed(5)
    x, ends = torch.randn(7, 16), torch.tensor([2, 2, 6], dtype=torch.int32)
    factor = torch.rand(3, 16) * 1e-3
    x8, scale = quantised_with(x, factor[0])
    assert apart(dequantised(x8, scale), x * factor[0]) < 0.03
    tokens, row_of = torch.randn(4, 16), torch.tensor([7, 0, 3, 2, 5, 6, 1])
    for rows, given in ((x, (x,)), (tokens[row_of // 2], (tokens, row_of, 2))):
        x8, scale = quantised_by_expert(given[0], factor, ends, *given[1:])
        want = rows * factor[[0, 0, 2, 2, 2, 2, 2]]
        assert apart(dequantised(x8, scale)[:6], want[:6]) < 0.03


def test_scales_are_those_of_whole_rows_where_columns_are_cut() -> None:
    torch.manual_seed(6)
    weight, kind = torch.randn(32, 64), kind_named("fp8")
    whole = kind.pack(weight)
    most = weight.abs().amax(-1, keepdim=True)
    halves = [kind.pack(half, lambda mine: torch.maximum(mine, most)) for half in weight.chunk(2, dim=1)]
    assert torch.equal(torch.cat([half.data.view(torch.uint8) for half in halves], dim=1), whole.data.view(torch.uint8))
    assert all(torch.equal(half.scale, whole.scale) for half in halves)
    assert kind.pack(weight[:, :0], lambda mine: mine).data.shape == (32, 0)


def test_the_linear_is_an_op_that_compiled_layers_hold() -> None:
    torch.manual_seed(5)
    x, held = torch.randn(8, 32, requires_grad=True), packed(torch.randn(48, 32))
    checks = ("test_faketensor", "test_autograd_registration")  # its other checks cannot compare fp8 numbers
    torch.library.opcheck(torch.ops.erniekit.stored_linear.default, (x, *held, False), test_utils=checks)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return linear(torch.tanh(x), held).pow(2).sum()

    (want,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    assert torch.equal(got, want)


def test_a_cpu_runs_it_and_other_devices_say_why_not() -> None:
    assert fp8_cards.why_not(torch.device("cpu"), experts=True) is None
    assert "NVIDIA" in (fp8_cards.why_not(torch.device("mps"), experts=False) or "")


def test_only_widths_the_cards_kernels_load_are_taken() -> None:
    assert kind_named("fp8").fits(48, 32)
    assert not any(kind_named("fp8").fits(*shape) for shape in ((40, 32), (48, 8)))
