"""Router logits from three 16-bit parts of an fp32 weight: as exact as the fp32 product, both ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from erniekit.kernels.router_logits import parts_of, router_logits


def test_three_16_bit_parts_sum_to_the_fp32_value() -> None:
    value = torch.randn(1000) * torch.logspace(-6, 6, 1000)
    assert torch.equal(sum(p.double() for p in parts_of(value, 3)), value.double())


def test_logits_and_gradients_from_parts_have_fp32s_precision() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 96).bfloat16().requires_grad_(), (torch.randn(7, 96) * 0.1).requires_grad_()
    upstream = torch.randn(50, 7)
    got = torch.ops.erniekit.router_logits(x, weight)
    a, b = (t.detach().double().requires_grad_() for t in (x, weight))
    want = F.linear(a, b)
    assert got.dtype == torch.float32
    assert (got.double() - want).norm() <= 1e-6 * want.norm()  # fp32 sums; a bf16 weight alone would be off by 2e-3
    got_x, got_weight = torch.autograd.grad(got, (x, weight), upstream)
    want_x, want_weight = torch.autograd.grad(want, (a, b), upstream.double())
    rounding = (want_x.bfloat16().double() - want_x).norm()
    assert (got_x.double() - want_x).norm() <= 1.01 * rounding  # from something far closer than a rounding
    assert (got_weight.double() - want_weight).norm() <= 1e-6 * want_weight.norm()


def test_a_frozen_router_forms_no_weight_gradient() -> None:
    x, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(3, 8)
    torch.ops.erniekit.router_logits(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_the_op_compiles_whole_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.erniekit.router_logits(x, weight).tanh()

    plain, whole = (f(x, weight) for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager")))
    assert torch.equal(plain, whole)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in (plain, whole))):
        assert torch.equal(a, b)


def test_what_the_op_says_of_itself_holds() -> None:
    x, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.erniekit.router_logits.default, (x, weight))
    grad = torch.randn(5, 3)
    torch.library.opcheck(
        torch.ops.erniekit.router_logits_backward.default, (grad, x.detach(), weight.detach(), [True, True])
    )


def test_elsewhere_the_product_is_the_plain_one() -> None:
    x, weight = torch.randn(5, 8).bfloat16(), torch.randn(3, 8)
    assert torch.equal(router_logits(x, weight), F.linear(x.float(), weight))
