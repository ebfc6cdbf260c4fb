"""Every attention path against the written-out mask, forward and backward, on random packs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.data.types import SharedKeys
from erniekit.kernels.attention import attention, reference

# fp32; sdpa sums keys in blocks, the reference in one row.
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


def inputs(batch: int, length: int, q_heads: int, kv_heads: int, head_dim: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda heads: torch.randn(batch, length, heads, head_dim, generator=generator)  # noqa: E731
    return [make(n).requires_grad_() for n in (q_heads, kv_heads, kv_heads)]


def random_bounds(batch: int, length: int, seed: int) -> torch.Tensor:
    """Random documents that fill every row exactly, one-token documents at both ends of the first row among them."""
    generator = torch.Generator().manual_seed(seed)
    bounds = {row * length for row in range(batch + 1)} | {1, length - 1}
    bounds |= set(torch.randint(1, batch * length, (3 * batch,), generator=generator).tolist())
    return torch.tensor(sorted(bounds), dtype=torch.int32)


def assert_equal_with_gradients(one, other, tensors) -> None:
    upstream = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(9))
    results = []
    for function in (one, other):
        for tensor in tensors:
            tensor.grad = None
        out = function(*tensors)
        out.backward(upstream)
        results.append([out.detach(), *(t.grad for t in tensors)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("batch", [1, 3])
def test_whole_rows_equal_the_reference(heads, batch):
    tensors = inputs(batch, 17, *heads, head_dim=8)
    assert_equal_with_gradients(lambda q, k, v: attention(q, k, v), lambda q, k, v: reference(q, k, v, None), tensors)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
def test_random_packs_equal_the_reference(heads, seed):
    tensors = inputs(2, 23, *heads, head_dim=8, seed=seed)
    bounds = random_bounds(2, 23, seed)
    assert 1 in bounds.diff().tolist()
    assert_equal_with_gradients(
        lambda q, k, v: attention(q, k, v, bounds, int(bounds.diff().max())),
        lambda q, k, v: reference(q, k, v, bounds),
        tensors,
    )


def test_a_pack_of_one_token_documents_returns_the_values_themselves():
    q, k, v = inputs(1, 5, 4, 2, head_dim=8)
    bounds = torch.arange(6, dtype=torch.int32)
    out = attention(q, k, v, bounds, 1)
    torch.testing.assert_close(out, v.repeat_interleave(2, dim=2), atol=0, rtol=0)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "masked", "reference"])
def test_no_backend_attends_across_documents(backend):
    q, k, v = inputs(1, 12, 4, 2, head_dim=8)
    bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    before = attention(q, k, v, bounds, 6, backend)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[:, :5] += 1.0
    after = attention(q, k, v, bounds, 6, backend)
    torch.testing.assert_close(after[:, 5:], before[:, 5:], atol=0, rtol=0)
    assert (after[:, 1:5] != before[:, 1:5]).any()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_token_sees_a_later_one(backend):
    q, k, v = inputs(1, 9, 4, 2, head_dim=8)
    before = attention(q, k, v, backend=backend)
    with torch.no_grad():
        k[:, 6:] += 1.0
        v[:, 6:] += 1.0
    after = attention(q, k, v, backend=backend)
    torch.testing.assert_close(after[:, :6], before[:, :6], atol=0, rtol=0)
    assert (after[:, 6:] != before[:, 6:]).any()


def test_the_reference_is_softmax_of_scaled_scores_over_the_past():
    """A case worked by hand, so that the oracle itself has one."""
    q = torch.tensor([[[[2.0, 0.0]], [[0.0, 2.0]]]])
    k = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    v = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])
    out = reference(q, k, v, None)
    p = 1 / (1 + torch.tensor(2.0 / 2**0.5).exp())  # weight of token 0 seen from token 1: scores 0 and 2 / sqrt(2)
    expected = torch.stack([v[0, 0, 0], p * v[0, 0, 0] + (1 - p) * v[0, 1, 0]])
    torch.testing.assert_close(out[0, :, 0], expected)


# Pairs as (prompt tokens that both answers share, chosen tokens, rejected tokens).
PAIRS = {
    "one pair": [[(5, 4, 6)]],
    "several pairs in a row": [[(3, 2, 4), (7, 5, 1), (1, 1, 1)]],
    "one-token answers": [[(6, 1, 1), (4, 1, 3)]],
    "nothing shared": [[(0, 4, 3), (0, 1, 1), (2, 3, 3)]],
    "long prompt, short answers": [[(17, 2, 3)]],
    "two rows with padding": [[(4, 3, 5), (2, 2, 2)], [(9, 1, 2)]],
}


def shared_rows(rows, length: int | None = None) -> tuple[int, torch.Tensor, int, SharedKeys]:
    """Length of a row, cu_seqlens, longest segment, shared keys: prompt + chosen | rejected | ... | padding."""
    length = length or max(sum(sum(pair) for pair in row) for row in rows) + 2
    sizes, keys = [], []
    for number, row in enumerate(rows):
        at = number * length
        for prompt, chosen, rejected in row:
            sizes += [prompt + chosen, rejected]
            answer = at + prompt + chosen
            keys += [range(at, answer), [*range(at, at + prompt), *range(answer, answer + rejected)]]
            at = answer + rejected
        if at < (number + 1) * length:
            sizes.append((number + 1) * length - at)
            keys.append(range(at, (number + 1) * length))
    bounds = lambda counts: torch.tensor([0, *counts]).cumsum(0).to(torch.int32)  # noqa: E731
    index = torch.tensor([place for segment in keys for place in segment])
    counts = [len(segment) for segment in keys]
    return length, bounds(sizes), max(sizes), SharedKeys(index, bounds(counts), max(counts))


def two_sequences(q, k, v, rows, length: int) -> torch.Tensor:
    """The same without sharing: prompt + chosen and prompt + rejected as sequences of their own."""
    out = []
    for number, row in enumerate(rows):
        at = 0
        for prompt, chosen, rejected in row:
            head = slice(at, at + prompt)
            one = slice(head.stop, head.stop + chosen)
            other = slice(one.stop, one.stop + rejected)
            for answer, kept in ((one, 0), (other, prompt)):
                sequence = [torch.cat((t[number, head], t[number, answer]))[None] for t in (q, k, v)]
                out.append(reference(*sequence, None)[0, kept:])
            at = other.stop
        if at < length:
            out.append(reference(*(t[number : number + 1, at:] for t in (q, k, v)), None)[0])
    return torch.cat(out).view_as(q)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_shared_prompt_equals_two_separate_sequences(name, heads, backend):
    length, bounds, longest, shared = shared_rows(PAIRS[name])
    tensors = inputs(len(PAIRS[name]), length, *heads, head_dim=8)
    assert_equal_with_gradients(
        lambda q, k, v: attention(q, k, v, bounds, longest, backend, shared),
        lambda q, k, v: two_sequences(q, k, v, PAIRS[name], length),
        tensors,
    )


def test_a_rejected_answer_never_sees_the_chosen_one():
    length, bounds, longest, shared = shared_rows([[(5, 4, 6)]])
    q, k, v = inputs(1, length, 4, 2, head_dim=8)
    before = attention(q, k, v, bounds, longest, shared=shared)
    with torch.no_grad():
        k[:, 5:9] += 1.0
        v[:, 5:9] += 1.0
    after = attention(q, k, v, bounds, longest, shared=shared)
    torch.testing.assert_close(after[:, 9:], before[:, 9:], atol=0, rtol=0)
    assert (after[:, 5:9] != before[:, 5:9]).any()


def test_shared_keys_make_no_mask_of_the_row():
    """512 tokens in 16 pairs: a mask of the row would be 512 x 512; no segment here sees more than 24 keys."""
    rows = [[(16, 8, 8)] * 16]
    length, bounds, longest, shared = shared_rows(rows, 512)
    tensors = inputs(1, length, 4, 2, head_dim=8)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        attention(*tensors, bounds, longest, "sdpa", shared).sum().backward()
    assert max(sizes) < 512 * 512 / 4
    sizes.clear()
    with Sizes():
        attention(*tensors, bounds, longest, "reference", shared)
    assert max(sizes) >= 512 * 512


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(16, 16), (16, 2)], ids=["mha", "gqa"])
def test_varlen_on_a_card_equals_the_reference(heads):
    """bf16: eight bits of mantissa; both outputs are compared with the fp32 reference."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA card")
    bounds = random_bounds(2, 256, 1).cuda()
    exact = [t.detach().cuda().requires_grad_() for t in inputs(2, 256, *heads, head_dim=128)]
    low = [t.detach().bfloat16().requires_grad_() for t in exact]
    upstream = torch.randn(exact[0].shape, device="cuda")
    expected = reference(*exact, bounds)
    got = attention(*low, bounds, int(bounds.diff().max()), "varlen")
    expected.backward(upstream), got.backward(upstream.bfloat16())
    for a, b in [(got, expected), *((x.grad, y.grad) for x, y in zip(low, exact))]:
        assert (a.float() - b).norm() <= 0.02 * b.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(16, 16), (16, 2)], ids=["mha", "gqa"])
def test_varlen_on_a_card_shares_prompts_as_the_reference_does(heads):
    """bf16, as above; rows of several pairs, among them one-token answers and nothing shared."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA card")
    rows = [[(70, 33, 41), (0, 5, 9), (128, 1, 1)], [(11, 130, 64)]]
    length, bounds, longest, shared = shared_rows(rows, 320)
    bounds, shared = bounds.cuda(), SharedKeys(shared.index.cuda(), shared.bounds.cuda(), shared.longest)
    exact = [t.detach().cuda().requires_grad_() for t in inputs(2, length, *heads, head_dim=128)]
    low = [t.detach().bfloat16().requires_grad_() for t in exact]
    upstream = torch.randn(exact[0].shape, device="cuda")
    expected = reference(*exact, bounds, shared)
    got = attention(*low, bounds, longest, "varlen", shared)
    expected.backward(upstream), got.backward(upstream.bfloat16())
    for a, b in [(got, expected), *((x.grad, y.grad) for x, y in zip(low, exact))]:
        assert (a.float() - b).norm() <= 0.02 * b.norm()
    again = [t.detach().requires_grad_() for t in low]
    attention(*again, bounds, longest, "varlen", shared).backward(upstream.bfloat16())
    assert torch.equal(again[1].grad, low[1].grad)  # a prompt's gradients are added in one order


@pytest.mark.parametrize("most", [1, 200, 1 << 26])  # scores at once: one query, some, all
def test_attention_with_a_mask_is_the_definition_for_packs_and_for_shared_keys(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from erniekit.kernels import attention as kernels

    monkeypatch.setattr(kernels, "MASKED", most)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 5, 6, 6, 12], dtype=torch.int32)  # one of a single token, one of none
    out = kernels.attention(q, k, v, bounds, backend="masked")
    torch.testing.assert_close(out, kernels.reference(q, k, v, bounds))
    # Two answers that see one prompt: documents of 4, 3 and 5 tokens with the keys 0-3, 0-6 and 0-3 with 7-11.
    index = torch.tensor([*range(4), *range(7), *range(4), *range(7, 12)])
    shared = SimpleNamespace(index=index, bounds=torch.tensor([0, 4, 11, 20], dtype=torch.int32), longest=9)
    bounds = torch.tensor([0, 4, 7, 12], dtype=torch.int32)
    out = kernels.attention(q, k, v, bounds, backend="masked", shared=shared)
    torch.testing.assert_close(out, kernels.reference(q, k, v, bounds, shared))
