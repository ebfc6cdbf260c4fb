"""Gate and up with SwiGLU as one op: its answer, its gradients, what it says of itself, and where it is chosen."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.gate_up import gate_up_swiglu, reference
from erniekit.kernels.selection import GateUpFacts, select
from erniekit.kernels.swiglu import pairs, swiglu_gradient
from erniekit.models.layers.mlp import MLP


def made(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (1, 6), (0, 6)])
def test_answer_and_gradients_are_the_definitions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = made(*shape), made(8, 6)
    torch.testing.assert_close(gate_up_swiglu(x, weight), reference(x, weight))
    grad = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    ours = torch.autograd.grad(gate_up_swiglu(x, weight), (x, weight), grad)
    want = torch.autograd.grad(reference(x, weight), (x, weight), grad)
    for got, true in zip(ours, want):
        torch.testing.assert_close(got, true)


def test_a_frozen_weight_forms_no_gradient_and_first_inputs_none_either() -> None:
    x, weight = made(3, 6), made(8, 6)
    assert torch.autograd.grad(gate_up_swiglu(x, weight.detach()).sum(), x)[0] is not None
    assert torch.autograd.grad(gate_up_swiglu(x.detach(), weight).sum(), weight)[0] is not None
    assert not gate_up_swiglu(x.detach(), weight.detach()).requires_grad


def test_what_the_op_says_of_itself_holds() -> None:
    given = made(5, 6, dtype=torch.float32), made(8, 6, dtype=torch.float32)
    torch.library.opcheck(torch.ops.erniekit.gate_up_swiglu, given)


def test_the_way_back_takes_pairs_and_answers_in_halves() -> None:
    torch.manual_seed(0)
    halves = made(4, 10, dtype=torch.float32)
    grad = torch.randn(4, 5)
    gate, up = halves.chunk(2, dim=1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, halves, grad)
    torch.testing.assert_close(swiglu_gradient(grad, pairs(halves.detach()), paired=True), want)


def test_no_cpu_and_no_wide_model_is_served_and_adapters_or_biases_keep_the_parts_apart() -> None:
    assert select("feed-forward", GateUpFacts(torch.device("cpu"), 64, 128, True)).reason == "quack: not on cpu"
    wide = select("feed-forward", GateUpFacts(torch.device("cuda"), 5120, 2 * 13824, True))
    assert wide.implementation == "product and swiglu"
    block = MLP(64, 64, bias=False)
    block.choose_kernels(torch.device("cpu"))
    assert not block.in_one_op
    with_bias = MLP(64, 64, bias=True)
    with_bias.choose_kernels(torch.device("cuda"))
    assert not with_bias.in_one_op


def test_the_block_trains_the_same_either_way_also_when_traced() -> None:
    torch.manual_seed(0)
    block, x = MLP(64, 64, bias=False).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    runs = {}
    for in_one_op in (False, True):
        block.in_one_op = in_one_op
        block.zero_grad()
        out = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
        out.float().square().sum().backward()
        runs[in_one_op] = [out.detach(), *(p.grad.clone() for p in block.parameters())]
    for apart, together in zip(runs[False], runs[True]):
        torch.testing.assert_close(together, apart, atol=5e-3, rtol=5e-2)  # bf16 rounds at other places


def test_who_looks_on_at_gate_and_up_sees_them_called() -> None:
    block, seen = MLP(64, 64, bias=False).bfloat16(), []
    block.in_one_op = True
    block.gate_up.register_forward_hook(lambda *given: seen.append(1))
    block(torch.randn(3, 64).bfloat16())
    assert seen == [1]
