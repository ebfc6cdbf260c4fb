"""Products in fp8 with static and block-wise scales: against their formulas written out, and their gradients."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import fp8_qat
from erniekit.kernels.expert_mlp import expert_mlp, expert_mlp_and_seen
from erniekit.kernels.linear import linear
from erniekit.kernels.lora_linear import RowUpdate, lora_linear
from erniekit.kernels.moe_permute import by_expert
from erniekit.kernels.stored import Stored, add_kind
from erniekit.kernels.stored.fp8_blocks import Fp8Blocks
from erniekit.kernels.stored.fp8_static import Fp8Static, PlainObserved, StaticFormat


def drawn(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * spread


def held(weight: torch.Tensor, x: torch.Tensor, form: StaticFormat) -> Stored:
    """As training holds it, with scales of the numbers at hand."""
    kind = Fp8Static(form)
    name = add_kind(kind)
    most = fp8_qat.rotated(weight, form.block).abs().flatten(-2).amax(-1)
    return Stored(weight, fp8_qat.scale_of(most).reshape(-1), fp8_qat.scale_of(kind.seen(x)), name)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The formula: one scale, the largest number is 448, to nearest."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def test_the_rotation_is_its_own_inverse_and_cancels_in_a_product():
    x, w = drawn(5, 96), drawn(7, 96, seed=1)
    turned = fp8_qat.rotated(x, 32)
    torch.testing.assert_close(fp8_qat.rotated(turned, 32), x, atol=1e-6, rtol=0)
    torch.testing.assert_close(turned @ fp8_qat.rotated(w, 32).t(), x @ w.t(), atol=1e-5, rtol=0)
    one = torch.zeros(1, 32)
    one[0, 3] = 1.0
    torch.testing.assert_close(fp8_qat.rotated(one, 32).abs(), torch.full((1, 32), 32**-0.5))


def test_a_product_is_that_of_both_sides_rounded_with_one_scale_each():
    x, w = drawn(6, 64), drawn(48, 64, seed=1, spread=0.02)
    got = linear(x, held(w, x, StaticFormat()))
    torch.testing.assert_close(got, rounded(x) @ rounded(w).t(), atol=1e-6, rtol=1e-6)
    assert (got - x @ w.t()).norm() / (x @ w.t()).norm() > 0.01, "fp8 must really have rounded"


def test_a_rotation_is_part_of_both_sides_and_of_the_scales():
    x, w = drawn(6, 64), drawn(48, 64, seed=1, spread=0.02)
    x[:, 5] *= 30
    got = linear(x, held(w, x, StaticFormat(block=32)))
    want = rounded(fp8_qat.rotated(x, 32)) @ rounded(fp8_qat.rotated(w, 32)).t()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, x @ w.t(), atol=0.2, rtol=0.2)


def test_what_is_above_the_scale_is_clipped_to_the_highest_number():
    x, w = torch.tensor([[2.0, 1.0] * 8]), torch.eye(16)
    weight = Stored(w, torch.tensor([1 / 448]), torch.tensor([1 / 448]), add_kind(Fp8Static()))
    torch.testing.assert_close(linear(x, weight), torch.ones(1, 16))


def test_gradients_pass_straight_through_the_rounding():
    x, w = drawn(6, 64).requires_grad_(), drawn(48, 64, seed=1).requires_grad_()
    grad = drawn(6, 48, seed=2)
    weight = held(w, x, StaticFormat(block=32))
    linear(x, weight).backward(grad)
    assert torch.equal(w.grad, grad.t() @ x.detach()), "by the rows as they were"
    seen = Fp8Static(StaticFormat(block=32)).unpack(weight, torch.float32)
    torch.testing.assert_close(x.grad, grad @ seen.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["e5m2", "e4m3"])
def test_gradients_may_be_rounded_too(form):
    x, w = drawn(16, 64).requires_grad_(), drawn(48, 64, seed=1).requires_grad_()
    grad = drawn(16, 48, seed=2)
    linear(x, held(w, x, StaticFormat(rows=form, weights=form))).backward(grad)
    dtype = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}[form]
    scale = grad.abs().max() / torch.finfo(dtype).max
    small = (grad / scale).to(dtype).float() * scale
    torch.testing.assert_close(x.grad, small @ rounded(w.detach()), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(w.grad, small.t() @ rounded(x.detach()), atol=1e-4, rtol=1e-4)


def test_adapters_see_nothing_of_the_rounding():
    x, w = drawn(6, 64), drawn(48, 64, seed=1)
    A, B = drawn(4, 64, seed=3).requires_grad_(), drawn(48, 4, seed=4).requires_grad_()
    weight = held(w, x, StaticFormat())
    got = lora_linear(x, weight, None, [RowUpdate(A, B, 0.5, ((0, 48),))])
    torch.testing.assert_close(got, linear(x, weight) + 0.5 * x @ A.t() @ B.t(), atol=1e-4, rtol=1e-4)
    got.sum().backward()
    torch.testing.assert_close(A.grad, 0.5 * (B.detach().sum(0)[:, None] * x.sum(0)), atol=1e-4, rtol=1e-4)


class TestExperts:
    T, H, W, E, K = 24, 32, 16, 4, 2

    def made(self) -> tuple[torch.Tensor, torch.Tensor, Stored, Stored]:
        """Tokens, their experts, and both weights; what is above 4 in the middle is clipped."""
        x = drawn(self.T, self.H)
        ids = torch.stack([drawn(self.E, seed=t).topk(self.K).indices for t in range(self.T)])
        gate_up = drawn(self.E, 2 * self.W, self.H, seed=5, spread=0.3).requires_grad_()
        down = drawn(self.E, self.H, self.W, seed=6, spread=0.3).requires_grad_()
        return x, ids, held(gate_up, x, StaticFormat()), held(down, torch.tensor([[4.0]]), StaticFormat())

    def test_one_input_scale_serves_all_experts_and_each_has_a_weight_scale(self):
        x, ids, first, last = self.made()
        got = expert_mlp(x, by_expert(ids, self.E), torch.ones(self.T, self.K), first, last)
        want = torch.zeros(self.T, self.H)
        for t, row in enumerate(rounded(x)):
            for e in ids[t].tolist():
                gate, up = (row @ rounded(first.data[e].detach()).t()).chunk(2)
                act = gate * gate.sigmoid() * up
                act = (act / last.extra).clamp(-448, 448).to(torch.float8_e4m3fn).float() * last.extra
                want[t] += act @ rounded(last.data[e].detach()).t()
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        got.sum().backward()
        assert first.data.grad.abs().sum() > 0
        assert last.data.grad.abs().sum() > 0

    def test_it_tells_the_largest_number_of_both_inputs(self):
        x, ids, first, last = self.made()
        given = x, by_expert(ids, self.E), torch.ones(self.T, self.K)
        name = add_kind(PlainObserved())
        y, seen = expert_mlp_and_seen(*given, *(Stored(w.data, kind=name) for w in (first, last)), *[None] * 3)
        torch.testing.assert_close(y, expert_mlp(*given, Stored(first.data), Stored(last.data)))
        assert seen[0] == x.abs().max()
        gate, up = torch.einsum("th,ewh->tew", x, first.data).chunk(2, dim=-1)
        act = (gate * gate.sigmoid() * up).abs().amax(-1)
        chosen = torch.zeros(self.T, self.E).scatter_(1, ids, 1.0)
        torch.testing.assert_close(seen[1], (act * chosen).max().detach())


def test_blocks_have_scales_of_their_own():
    x, w = drawn(4, 300), drawn(200, 300, seed=1)
    x[0, :128] *= 1000
    w[:128, 128:256] *= 1000
    got = fp8_qat.row_blocks(x, torch.float32)
    for row in range(4):
        for start in range(0, 300, 128):
            torch.testing.assert_close(got[row, start : start + 128], rounded(x[row, start : start + 128]))
    square = fp8_qat.square_blocks(w, torch.float32)
    for top in range(0, 200, 128):
        for left in range(0, 300, 128):
            part = (slice(top, top + 128), slice(left, left + 128))
            torch.testing.assert_close(square[part], rounded(w[part]))
    assert torch.equal(fp8_qat.square_blocks(w.t(), torch.float32), square.t()), "the transpose is rounded alike"


def test_block_wise_products_round_all_three_products_of_a_linear():
    x, w, grad = drawn(130, 140).requires_grad_(), drawn(150, 140, seed=1).requires_grad_(), drawn(130, 150, seed=2)
    y = linear(x, Stored(w, kind=add_kind(Fp8Blocks())))
    y.backward(grad)
    rows, square = fp8_qat.row_blocks, fp8_qat.square_blocks
    torch.testing.assert_close(y, rows(x, torch.float32) @ square(w, torch.float32).t())
    torch.testing.assert_close(x.grad, rows(grad, torch.float32) @ square(w, torch.float32))
    along = [rows(t.detach().t(), torch.float32) for t in (grad, x)]
    torch.testing.assert_close(w.grad, along[0] @ along[1].t(), atol=1e-4, rtol=1e-4)
