"""Routed and shared experts in one op against the two ops after each other; on a card tests/device has the streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erniekit.kernels import expert_mlp, lora_linear
from erniekit.kernels.expert_mlp import Update
from erniekit.kernels.experts_and_shared import experts_and_shared
from erniekit.kernels.fp8_product import Fp8Weight, fp8_weight
from erniekit.kernels.lora_linear import RowUpdate
from erniekit.kernels.moe_permute import by_expert
from erniekit.kernels.swiglu import swiglu

T, K, E, H, W, S = 13, 2, 4, 8, 6, 12


def made(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


class Block:
    """Tokens, routed experts and shared ones, all adapted."""

    def __init__(self, trained: bool = False) -> None:
        torch.manual_seed(0)
        self.x, self.weights = made(T, H), torch.rand(T, K, requires_grad=True)
        self.order = by_expert(torch.rand(T, E - 1).topk(K).indices, E)
        self.held = made(E, 2 * W, H, grad=trained), made(E, H, W, grad=trained)
        sizes = ((H, W), (H, W), (W, H))
        self.updates = [Update(made(E, 3, i), made(E, o, 3), 1.5) for i, o in sizes]
        self.shared: list[Any] = [made(2 * S, H, grad=False), made(H, S, grad=False)]
        halves = [RowUpdate(made(2, H), made(S, 2), 0.5, ((i * S, i * S + S),)) for i in range(2)]
        self.rows = halves, [RowUpdate(made(3, S), made(H, 3), 2.0, ((0, H),))]

    def leaves(self) -> list[torch.Tensor]:
        pairs = [*self.updates, *self.rows[0], *self.rows[1]]
        found = [self.x, self.weights, *self.held, *(t for pair in pairs for t in pair[:2])]
        return [t for t in found if t.requires_grad]

    def given(self) -> tuple[Any, ...]:
        routed = expert_mlp.as_given(self.x, self.order, self.weights, *self.held, *self.updates)
        return routed, self.x, *(lora_linear.as_given(w, rows) for w, rows in zip(self.shared, self.rows))

    def at_once(self) -> tuple[torch.Tensor, torch.Tensor]:
        return experts_and_shared(*self.given())

    def in_turn(self) -> tuple[torch.Tensor, torch.Tensor]:
        y = expert_mlp.expert_mlp(self.x, self.order, self.weights, *self.held, *self.updates)
        act = swiglu(lora_linear.lora_linear(self.x, self.shared[0], None, self.rows[0]))
        return y, lora_linear.lora_linear(act, self.shared[1], None, self.rows[1])


@pytest.mark.parametrize("trained", [False, True])
def test_answers_and_all_gradients_are_those_of_both_in_turn(trained: bool) -> None:
    block, grads = Block(trained), (torch.randn(T, H), torch.randn(T, H))
    leaves = block.leaves()
    for got, want in zip(block.at_once(), block.in_turn()):
        torch.testing.assert_close(got, want, atol=0, rtol=0)
    ours = torch.autograd.grad(block.at_once(), leaves, grads)
    theirs = torch.autograd.grad(block.in_turn(), leaves, grads)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", [0, 1])
def test_one_answer_alone_has_its_own_gradients(which: int) -> None:
    block = Block()
    ours = torch.autograd.grad(block.at_once()[which].sum(), block.leaves(), allow_unused=True)
    theirs = torch.autograd.grad(block.in_turn()[which].sum(), block.leaves(), allow_unused=True)
    for got, want in zip(ours, theirs):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)


def test_only_what_is_trained_gets_a_gradient() -> None:
    block = Block()
    for frozen in (block.x, block.weights, block.updates[0].A, block.rows[1][0].B):
        frozen.requires_grad_(False)
    sum(y.sum() for y in block.at_once()).backward()
    assert block.x.grad is None
    assert block.updates[0].A.grad is None
    assert block.rows[1][0].B.grad is None
    assert all(leaf.grad is not None for leaf in block.leaves())


def test_what_the_op_says_of_itself_holds() -> None:
    routed, x, gate_up, down = Block().given()
    torch.library.opcheck(torch.ops.erniekit.experts_and_shared, (*routed, x, *gate_up, *down))


def test_a_shared_base_in_fp8_is_multiplied_in_fp8() -> None:
    block = Block()
    block.shared = [fp8_weight(weight) for weight in block.shared]
    assert isinstance(block.shared[0], Fp8Weight)
    grads = torch.randn(T, H), torch.randn(T, H)
    ours = torch.autograd.grad(block.at_once(), block.leaves(), grads)
    torch.testing.assert_close(ours, torch.autograd.grad(block.in_turn(), block.leaves(), grads))


def test_it_is_traced_whole() -> None:
    block = Block()
    traced = torch.compile(block.at_once, backend="aot_eager", fullgraph=True)
    grads = torch.randn(T, H), torch.randn(T, H)
    ours = torch.autograd.grad(traced(), block.leaves(), grads)
    torch.testing.assert_close(ours, torch.autograd.grad(block.in_turn(), block.leaves(), grads))
