"""Every attention path against the written-out mask, forward and backward, on random packs."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
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
