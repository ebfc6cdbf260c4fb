from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

from erniekit.kernels.lora_linear import RowUpdate, in_one_op, lora_linear, placed, reference
from erniekit.kernels.stored import Stored

IN, OUT = 5, 14


class Case(NamedTuple):
    spans: list[tuple[tuple[int, int], ...]]  # of each update
    ranks: list[int]
    scales: list[float]
    bias: bool = False


CASES = {
    "one on all rows": Case([((0, 14),)], [3], [1.5], bias=True),
    "one for each part": Case([((0, 6),), ((6, 10),), ((10, 14),)], [2, 2, 2], [0.7] * 3),
    "other ranks and scales": Case([((0, 6),), ((6, 10),), ((10, 14),)], [1, 3, 2], [0.7, 2.0, -3.1], bias=True),
    "the middle part": Case([((6, 10),)], [2], [1.5]),
    "the outer parts, the last first": Case([((10, 14),), ((0, 6),)], [2, 1], [1.5, 0.3], bias=True),
    "one for all parts": Case([((0, 6), (6, 10), (10, 14))], [2], [1.5]),
    "one for two parts, one beside": Case([((0, 6), (10, 14)), ((6, 10),)], [2, 2], [1.5, 1.5]),
    "parts of no rows": Case([((0, 0), (0, 14)), ((14, 14),)], [2, 2], [1.5, 1.5]),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inputs(case: Case, dtype: torch.dtype = torch.float64, tokens: int = 7) -> list[torch.Tensor | None]:
    """x, weight, bias and every A and B, all with gradients."""
    torch.manual_seed(0)
    shapes = [(tokens, IN), (OUT, IN), (OUT,) if case.bias else None]
    for spans, rank in zip(case.spans, case.ranks):
        shapes += [(rank, IN), (sum(end - first for first, end in spans), rank)]
    return [s if s is None else torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def updates(case: Case, factors: list[torch.Tensor]) -> list[RowUpdate]:
    return [RowUpdate(*one) for one in zip(factors[::2], factors[1::2], case.scales, case.spans)]


def called(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *factors: torch.Tensor):
    return lora_linear(x, Stored(weight), bias, updates(case, list(factors)))


def merged(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *factors: torch.Tensor):
    """Each update put into the weight, span by span."""
    for A, B, scale, spans in updates(case, list(factors)):
        for (first, end), b in zip(spans, B.split([end - first for first, end in spans])):
            before, own, after = weight.split([first, end - first, OUT - end])
            weight = torch.cat([before, own + scale * b @ A, after])
    return x @ weight.t() + (0.0 if bias is None else bias)


def op_args(case: Case, dtype: torch.dtype = torch.float64) -> tuple[object, ...]:
    x, weight, bias, *factors = inputs(case, dtype)
    A, B = torch.cat(factors[::2]), placed(updates(case, factors), OUT)
    given = [t if t is None else t.detach().requires_grad_() for t in (x, weight, bias, A, B)]
    return (*given, list(case.scales), list(case.ranks))


def flat(args: tuple[object, ...]) -> tuple[object, ...]:
    """As the op takes them: its weight is a stored one."""
    x, weight, *rest = args
    return (x, *Stored(weight), *rest)


def tensors(given: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [t for t in given if t is not None]


@cases
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_the_answer_and_every_gradient_are_those_of_the_merged_weight(
    case: Case, dtype: torch.dtype, close: float
) -> None:
    given = inputs(case, dtype)
    got, want = called(case, *given), merged(case, *given)
    # two small products against one large: only the order of sums differs
    torch.testing.assert_close(got, want, atol=close, rtol=close)
    upstream = torch.randn_like(got)
    grads = [torch.autograd.grad(y, tensors(given), upstream) for y in (got, want)]
    torch.testing.assert_close(*grads, atol=close, rtol=close)


@cases
def test_the_op_is_its_definition(case: Case) -> None:
    args = op_args(case)
    got, want = torch.ops.erniekit.lora_linear(*flat(args))[0], reference(*args)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    upstream, wrt = torch.randn_like(got), tensors(list(args[:5]))
    grads = [torch.autograd.grad(y, wrt, upstream) for y in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_updates_the_bits_are_those_of_updates_of_zero(dtype: torch.dtype) -> None:
    case = CASES["one for each part"]
    x, weight, bias, *factors = inputs(case, dtype)
    zero = updates(case, [torch.zeros_like(t) if number % 2 else t for number, t in enumerate(factors)])
    upstream, results = torch.randn(*x.shape[:-1], OUT, dtype=dtype), []
    for given in (zero, []):
        y = lora_linear(x, Stored(weight), bias, given)
        results.append([y, *torch.autograd.grad(y, x, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert torch.allclose(results[1][0], torch.nn.functional.linear(x, weight, bias), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["one for each part", "other ranks and scales"])
def test_first_and_second_derivatives_are_what_small_steps_show(name: str) -> None:
    case = CASES[name]
    given = inputs(case, tokens=2)
    assert gradcheck(lambda *t: called(case, *t), given)
    assert gradgradcheck(lambda *t: called(case, *t), given)


@pytest.mark.parametrize(
    "wanted", [(1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1), (1, 0, 0, 1, 1)]
)
@pytest.mark.parametrize("scales", [[0.7, 0.7, 0.7], [0.7, 2.0, -3.1]])
def test_just_the_wanted_gradients_are_formed(wanted: tuple[int, ...], scales: list[float]) -> None:
    *given, _, ranks = op_args(CASES["other ranks and scales"])
    args = (*given, scales, ranks)
    x, weight, _, A, B = given
    y, low = torch.ops.erniekit.lora_linear(*flat(args))
    upstream = torch.randn_like(y)
    with torch.no_grad():
        found = torch.ops.erniekit.lora_linear_backward(
            upstream, x, low, *Stored(weight), A, B, scales, ranks, [bool(w) for w in wanted]
        )
    want = torch.autograd.grad(reference(*args), [t for t, w in zip(given, wanted) if w], upstream)
    torch.testing.assert_close(tuple(found), want, atol=1e-12, rtol=1e-12)


def test_a_frozen_weight_and_inputs_without_gradient_get_none() -> None:
    case = CASES["one for each part"]
    given = inputs(case)
    x, weight, _, *factors = given
    x.requires_grad_(False), weight.requires_grad_(False)
    asked = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.erniekit.lora_linear_backward.default:
                asked.append(args[-1])
            return function(*args, **(kwargs or {}))

    with Watch():
        called(case, *given).sum().backward()
    assert asked == [[False, False, False, True, True]]
    assert x.grad is None
    assert weight.grad is None
    assert all(t.grad is not None for t in factors)


def test_nothing_as_wide_as_the_output_is_kept_for_backward() -> None:
    case, tokens = CASES["one for each part"], 7
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        called(case, *inputs(case, tokens=tokens))
    assert {(tokens, IN), (OUT, IN), (tokens, sum(case.ranks))} <= set(kept)
    assert (tokens, OUT) not in kept


@pytest.mark.parametrize("shape", [(2, 3, IN), (2, 1, 2, IN), (IN,), (0, IN), (2, 0, IN)])
def test_any_leading_dims_go_through(shape: tuple[int, ...]) -> None:
    case = CASES["other ranks and scales"]
    _, *rest = inputs(case)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True), *rest]
    got, want = called(case, *given), merged(case, *given)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.sum(), tensors(given)) for y in (got, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["one on all rows", "other ranks and scales", "one for two parts, one beside"])
def test_compiled_without_a_break_it_answers_the_same(name: str) -> None:
    case = CASES[name]
    given = inputs(case)
    given[1].requires_grad_(False)
    compiled = torch.compile(lambda *t: called(case, *t), fullgraph=True, backend="aot_eager")
    got, want = compiled(*given), called(case, *given)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    upstream, wrt = torch.randn_like(got), [t for t in tensors(given) if t.requires_grad]
    grads = [torch.autograd.grad(y, wrt, upstream) for y in (got, want)]
    torch.testing.assert_close(*grads, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["one for each part", "other ranks and scales"])
def test_torch_finds_nothing_to_object_to_in_the_ops(name: str) -> None:
    args = op_args(CASES[name], torch.float32)
    torch.library.opcheck(torch.ops.erniekit.lora_linear, flat(args))
    x, weight, _, A, B, scales, ranks = (t.detach() if isinstance(t, torch.Tensor) else t for t in args)
    given = (torch.randn(7, OUT), x, torch.randn(7, sum(ranks)), *Stored(weight), A, B, scales, ranks)
    for wanted in ([True] * 5, [True, False, False, True, True], [False, False, False, False, True]):
        torch.library.opcheck(torch.ops.erniekit.lora_linear_backward, (*given, wanted))


@pytest.mark.parametrize("at", range(5))
def test_tensors_of_another_dtype_or_with_ways_of_their_own_are_not_for_the_op(at: int) -> None:
    case = CASES["one on all rows"]
    given = inputs(case, torch.float32)
    assert in_one_op(given[0], Stored(given[1]), given[2], updates(case, given[3:]))
    for other in (given[at].bfloat16(), given[at].as_subclass(type("Wrapped", (torch.Tensor,), {}))):
        x, weight, bias, *factors = [*given[:at], other, *given[at + 1 :]]
        assert not in_one_op(x, Stored(weight), bias, updates(case, factors))
