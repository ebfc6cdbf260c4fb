"""The fused attention op on a card: every back end against the written-out reference."""

from __future__ import annotations

import pytest
import torch
from device_cases.attention import D, attend, bounds_of, inputs, kernels, shared_prompt

from erniekit.bench.profile import by_name, spans_of
from erniekit.data.types import Batch
from erniekit.devices import pick
from erniekit.kernels import flash4
from erniekit.kernels.attention import reference
from erniekit.kernels.packed_attention import backend_for, packed_attention, packs_of
from erniekit.kernels.rope import ROTATIONS
from erniekit.kernels.rope_qkv import turned
from erniekit.parallel.context import in_order, split, take

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


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_a_sequence_together_equal_the_reference_of_the_whole(ranks: int) -> None:
    lengths, heads, kv_heads = [1, 300, 77, 644, 2], 16, 2
    torch.manual_seed(0)
    rand = lambda n: torch.randn(1, sum(lengths), n, D, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    whole, grad = [rand(n) for n in (heads, kv_heads, kv_heads)], rand(heads)
    exact = [t.double().requires_grad_() for t in whole]
    want = reference(*exact, bounds_of(lengths))
    want.backward(grad.double())
    token = torch.arange(sum(lengths))[None]
    batch = Batch(token, token, token, bounds_of(lengths).cpu(), max(lengths), 0)
    for kernel in kernels(packed=True):
        of_keys = [torch.zeros_like(t.grad) for t in exact[1:]]
        for rank in range(ranks):
            mine = split(batch, rank, ranks).to(torch.device("cuda", 0))
            packs = packs_of(mine.cu_seqlens, mine.max_doc, mine.shared, mine.input_ids.numel())
            q = take(whole[0], rank, ranks).requires_grad_()
            k, v = (torch.cat([take(t, r, ranks) for r in range(ranks)], 1).requires_grad_() for t in whole[1:])
            out = packed_attention(q, k, v, packs, kernel)
            out.backward(take(grad, rank, ranks).flatten(2))
            assert error(out, take(want, rank, ranks).flatten(2)) < 0.006, kernel
            assert error(q.grad, take(exact[0].grad, rank, ranks)) < 0.012, kernel
            of_keys = [a + in_order(t.grad, ranks) for a, t in zip(of_keys, (k, v))]
        for got, t in zip(of_keys, exact[1:]):
            assert error(got, t.grad) < 0.012, kernel


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
    calls = {name: count for name, (_, count) in by_name(spans_of(seen, pick("gpu"))).items()}
    assert calls == {"turn": 1, "turn_back": 1}, calls  # views into one output would be copied first
