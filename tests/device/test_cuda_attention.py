"""The fused attention op on a card: every back end against the written-out reference."""

from __future__ import annotations

import pytest
import torch
from device_cases.attention import D, attend, bounds_of, inputs, kernels, shared_prompt

from erniekit.bench.profile import kernels_of
from erniekit.devices import pick
from erniekit.kernels import flash4
from erniekit.kernels.attention import reference
from erniekit.kernels.packed_attention import backend_for, packs_of
from erniekit.kernels.rope import ROTATIONS
from erniekit.kernels.rope_qkv import turned

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

HEADS = [(16, 2), (20, 4), (8, 8)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def answer_and_gradient(qkv, grad, cos, sin, heads, kv_heads, style, bounds, longest, shared, kernel):
    x = qkv.detach().clone().requires_grad_()
    if kernel == "reference":
        y = x.double()
        y.retain_grad()
        sizes = [heads * D, kv_heads * D, kv_heads * D]
        q, k, v = (t.unflatten(-1, (-1, D)) for t in y.split(sizes, dim=-1))
        turn = ROTATIONS[style]
        c, s = cos.double(), sin.double()
        out = reference(turn(q, c, s), turn(k, c, s), v, bounds, shared).flatten(2)
        out.backward(grad.double())
        return out, y.grad
    packs = None if bounds is None else packs_of(bounds, longest, shared, x.shape[0] * x.shape[1])
    out = attend(x, cos, sin, heads, kv_heads, style == "halves", packs, kernel)
    out.backward(grad)
    return out, x.grad


def test_flash4_is_chosen_where_it_is_installed_and_never_where_the_same_bits_are_asked_for() -> None:
    if flash4.library() is None:
        pytest.skip("flash-attn-4 is not installed")
    device = torch.device("cuda", 0)
    assert [backend_for(device, 8, D, packed) for packed in (False, True)] == ["flash4", "flash4"]
    torch.use_deterministic_algorithms(True)
    try:
        assert [backend_for(device, 8, D, packed) for packed in (False, True)] == ["rows", "flash"]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("style", ["pairs", "halves"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_one_document_rows_equal_the_reference(heads: int, kv_heads: int, style: str) -> None:
    given = inputs(2, 640, heads, kv_heads)
    want = answer_and_gradient(*given, heads, kv_heads, style, None, None, None, "reference")
    for kernel in kernels(packed=False):
        got = answer_and_gradient(*given, heads, kv_heads, style, None, None, None, kernel)
        assert error(got[0], want[0]) < 0.006, kernel
        assert error(got[1], want[1]) < 0.012, kernel


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_packs_with_documents_of_one_token_equal_the_reference(heads: int, kv_heads: int) -> None:
    lengths = [1, 300, 77, 1, 900, 1]
    given = inputs(1, sum(lengths), heads, kv_heads)
    bounds = bounds_of(lengths)
    want = answer_and_gradient(*given, heads, kv_heads, "pairs", bounds, 900, None, "reference")
    for kernel in kernels(packed=True):
        got = answer_and_gradient(*given, heads, kv_heads, "pairs", bounds, 900, None, kernel)
        assert error(got[0], want[0]) < 0.006, kernel
        assert error(got[1], want[1]) < 0.012, kernel


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_answers_that_share_a_prompt_equal_the_reference(heads: int, kv_heads: int) -> None:
    bounds, longest, shared, tokens = shared_prompt([(120, 40, 33), (1, 5, 9), (300, 20, 64)])
    given = inputs(1, tokens, heads, kv_heads)
    want = answer_and_gradient(*given, heads, kv_heads, "pairs", bounds, longest, shared, "reference")
    for kernel in kernels(packed=True):
        got = answer_and_gradient(*given, heads, kv_heads, "pairs", bounds, longest, shared, kernel)
        assert error(got[0], want[0]) < 0.006, kernel
        assert error(got[1], want[1]) < 0.012, kernel


def test_a_compiled_projection_is_turned_by_one_kernel_each_way() -> None:
    from torch.profiler import ProfilerActivity, profile

    qkv, _, cos, sin = inputs(1, 512, 16, 2)
    qkv.requires_grad_()
    turn = torch.compile(lambda x: turned(x, cos, sin, 16, 2, False), fullgraph=True)

    def step() -> None:
        q, k, v = turn(qkv)
        torch.autograd.grad((q, k, v), qkv, (q, k, v))

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    calls = {name: count for name, (_, count) in kernels_of(seen, pick("gpu")).items()}
    assert calls == {"turn": 1, "turn_back": 1}, calls  # views into one output would be copied first
