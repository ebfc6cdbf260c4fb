"""A linear with adapters whose weight is in fp8: the frozen product rounded both ways, the adapters' not at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from erniekit.kernels.linear import linear
from erniekit.kernels.lora_linear import RowUpdate, in_one_op, lora_linear
from erniekit.kernels.stored import Stored, kind_named

IN, OUT = 32, 48
SPANS = ((0, 16), (16, 48))


def inputs(bias: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[RowUpdate]]:
    torch.manual_seed(0)
    updates = [
        RowUpdate(torch.randn(3, IN, requires_grad=True), torch.randn(b - a, 3, requires_grad=True), scale, ((a, b),))
        for (a, b), scale in zip(SPANS, (0.7, 2.0))
    ]
    x = torch.randn(2, 9, IN, requires_grad=True)
    return x, torch.randn(OUT, IN), torch.randn(OUT) if bias else None, updates


def fp8_weight(weight: torch.Tensor) -> Stored:
    return kind_named("fp8").pack(weight)


def by_pieces(x: torch.Tensor, weight: Stored, bias: torch.Tensor | None, updates: list[RowUpdate]) -> torch.Tensor:
    low = torch.cat([u.scale * F.linear(F.linear(x, u.A), u.B) for u in updates], dim=-1)
    y = linear(x, weight) + low
    return y if bias is None else y + bias


def gradients(y: torch.Tensor, x: torch.Tensor, updates: list[RowUpdate]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(y.shape, generator=generator)
    return torch.autograd.grad(y, [x, *(t for u in updates for t in u[:2])], upstream)


@pytest.mark.parametrize("bias", [False, True])
def test_the_answer_and_every_gradient_are_those_of_the_pieces(bias: bool) -> None:
    x, weight, added, updates = inputs(bias)
    held = fp8_weight(weight)
    assert in_one_op(x, held, added, updates)
    got, want = (f(x, held, added, updates) for f in (lora_linear, by_pieces))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for a, b in zip(gradients(got, x, updates), gradients(want, x, updates)):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_adapters_gradients_are_those_over_the_given_weight() -> None:
    """They depend on x, on the upstream gradient and on each other; none of these is rounded for them."""
    x, weight, _, updates = inputs()
    over_fp8 = gradients(lora_linear(x, fp8_weight(weight), None, updates), x, updates)
    over_fp32 = gradients(lora_linear(x, Stored(weight), None, updates), x, updates)
    for a, b in zip(over_fp8[1:], over_fp32[1:]):
        torch.testing.assert_close(a, b)
    apart = (over_fp8[0] - over_fp32[0]).norm() / over_fp32[0].norm()
    assert 0.005 < apart < 0.05, "x's goes through the frozen product"


def test_it_compiles_without_a_break_and_answers_the_same() -> None:
    x, weight, _, updates = inputs()
    held = fp8_weight(weight)

    def run(x: torch.Tensor) -> torch.Tensor:
        return lora_linear(torch.tanh(x), held, None, updates)

    plain, whole = run(x), torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(plain, whole)
    for a, b in zip(gradients(plain, x, updates), gradients(whole, x, updates)):
        assert torch.equal(a, b)


def test_somebody_who_differentiates_twice_gets_the_pieces_second_derivatives() -> None:
    x, weight, _, updates = inputs()
    held, found = fp8_weight(weight), []
    for f in (lora_linear, by_pieces):
        (first,) = torch.autograd.grad(f(x, held, None, updates).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [u.A for u in updates]))
    for a, b in zip(*found):
        assert (a - b).norm() < 1e-3 * b.norm()
