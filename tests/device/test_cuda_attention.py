"""The fused attention op on a card: every back end against the written-out reference, and what each costs.

Run by `pytest -m cuda`, or as a script for the table of times.
"""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from erniekit.bench.profile import kernels_of
from erniekit.devices import pick
from erniekit.kernels import cudnn_packed, flash4
from erniekit.kernels.attention import attention, reference
from erniekit.kernels.packed_attention import backend_for, packed_attention, packs_of
from erniekit.kernels.rope import ROTATIONS, cos_sin, inverse_frequencies
from erniekit.kernels.rope_qkv import turned

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

D = 128
HEADS = [(16, 2), (20, 4), (8, 8)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def inputs(B: int, L: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    qkv = torch.randn(B, L, (heads + 2 * kv_heads) * D, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(B, L, heads * D, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(L, device="cuda").expand(B, L)
    cos, sin = cos_sin(positions, inverse_frequencies(D, 500000.0, None, qkv.device))
    return qkv, grad, cos, sin


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


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


def attend(x, cos, sin, heads, kv_heads, halves, packs, kernel):
    q, k, v = turned(x, cos, sin, heads, kv_heads, halves)
    if packs is None:
        return (flash4.row_attention if kernel == "flash4" else attention)(q, k, v).flatten(2)
    return packed_attention(q, k, v, packs, kernel)


def kernels(packed: bool) -> list[str]:
    found = ["flash"] + (["cudnn"] if cudnn_packed.library() is not None else []) if packed else ["rows"]
    return found + (["flash4"] if flash4.library() is not None else [])


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


def shared_prompt(pairs: list[tuple[int, int, int]]) -> tuple[torch.Tensor, int, SimpleNamespace, int]:
    """Bounds, longest, keys and tokens of (prompt, chosen, rejected) triples."""
    queries, index, keys, start = [], [], [], 0
    for prompt, chosen, rejected in pairs:
        queries += [prompt + chosen, rejected]
        first = torch.arange(start, start + prompt + chosen)
        second = torch.cat([first[:prompt], torch.arange(rejected) + start + prompt + chosen])
        index += [first, second]
        keys += [len(first), len(second)]
        start += prompt + chosen + rejected
    shared = SimpleNamespace(index=torch.cat(index).cuda(), bounds=bounds_of(keys), longest=max(keys))
    return bounds_of(queries), max(queries), shared, start


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


def times(call, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))[repeats // 2]


def log_normal(total: int, mean: int, seed: int = 0) -> list[int]:
    torch.manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        n = int(torch.empty(()).log_normal_(0.0, 0.5).item() * mean * 0.88) + 1
        lengths.append(min(n, total - sum(lengths)))
    return lengths


def table() -> None:
    def row(what: str, call) -> None:
        try:
            print(what, *call(), flush=True)
        except Exception as problem:
            print(what, "FAILED", str(problem)[:300].replace("\n", " "), flush=True)

    def both(kernel: str, L: int, heads: int, kv: int, bounds=None, longest=None, shared=None):
        def run():
            qkv, grad, cos, sin = inputs(1, L, heads, kv)
            packs = None if bounds is None else packs_of(bounds, longest, shared, L)
            x = qkv.requires_grad_()
            with torch.no_grad():
                forward = times(lambda: attend(x, cos, sin, heads, kv, False, packs, kernel))

            def step() -> None:
                x.grad = None
                attend(x, cos, sin, heads, kv, False, packs, kernel).backward(grad)

            return f"fwd {forward:.3f} ms", f"fwd+bwd {times(step):.3f} ms"

        return run

    for L, heads, kv in ((8192, 16, 2), (8192, 20, 4), (32768, 16, 2)):
        for kernel in kernels(packed=False):
            row(f"one document {L} {heads}/{kv} {kernel}:", both(kernel, L, heads, kv))
    for L, heads, kv in ((8192, 16, 2), (32768, 16, 2), (8192, 20, 4)):
        lengths = log_normal(L, 1000)
        for kernel in kernels(packed=True):
            row(
                f"pack {L} of {len(lengths)} {heads}/{kv} {kernel}:",
                both(kernel, L, heads, kv, bounds_of(lengths), max(lengths)),
            )
    bounds, longest, shared, tokens = shared_prompt([(3072, 512, 512)] * 4)
    for kernel in kernels(packed=True):
        row(f"4 pairs {tokens} {kernel}:", both(kernel, tokens, 16, 2, bounds, longest, shared))


if __name__ == "__main__":
    start = time.time()
    code = pytest.main([__file__, "-q", "-x", "--no-header", "-p", "no:cacheprovider", "--override-ini=addopts="])
    table()
    print(f"{time.time() - start:.0f} s")
    sys.exit(code)
