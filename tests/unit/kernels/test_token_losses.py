"""The loss of each token against the two-line reference: values, every gradient, and what is never in memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.kernels.token_losses import linear_token_losses, reference
from erniekit.models.layers.head import LocalHead

TOKENS, HIDDEN, VOCAB = 37, 24, 53


def case(dtype: torch.dtype = torch.float32, bias: bool = True, ignored: float = 0.3):
    generator = torch.Generator().manual_seed(5)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight = rand(TOKENS, HIDDEN).to(dtype), (0.3 * rand(VOCAB, HIDDEN)).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < ignored] = -100
    leaves = [hidden, weight, rand(VOCAB).to(dtype) if bias else None]
    return [t.requires_grad_() if t is not None else None for t in leaves], labels


def run(function, leaves, labels, **options):
    """Values and gradients, each token with an upstream gradient of its own, some of them zero or negative."""
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    hidden, weight, bias = leaves
    losses = function(hidden, weight, labels, bias, **options)
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(7))
    upstream[3] = 0.0
    losses.backward(upstream)
    return [losses.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("chunk", [1, 7, 26, 1000])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_values_and_gradients_equal_the_reference_for_any_chunk(chunk, bias):
    leaves, labels = case(bias=bias)
    ours = run(linear_token_losses, leaves, labels, chunk=chunk)
    assert ours[0].dtype == torch.float32
    for a, b in zip(ours, run(reference, leaves, labels)):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_ignored_tokens_lose_nothing_and_get_no_gradient():
    leaves, labels = case()
    losses, grad_hidden, _, _ = run(linear_token_losses, leaves, labels)
    assert not losses[labels == -100].any()
    assert not grad_hidden[labels == -100].any()
    assert (losses[labels != -100] > 0).all()


def test_nothing_to_score_is_zero_with_zero_gradients_for_all():
    leaves, labels = case()
    results = run(linear_token_losses, leaves, torch.full_like(labels, -100))
    assert results[0].shape == (TOKENS,)
    assert all(t is not None and not t.any() for t in results)


def test_bf16_gradients_round_no_worse_than_the_reference():
    """Both round logits and dlogits to bf16 (2^-9 relative); ours sums chunks in fp32, so it may only be nearer."""
    exact_leaves, labels = case()
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in exact_leaves]
    exact = run(reference, [leaf.detach().float().requires_grad_() for leaf in leaves], labels)
    ours, theirs = run(linear_token_losses, leaves, labels, chunk=7), run(reference, leaves, labels)
    for a, b, truth in zip(ours, theirs, exact):
        ours_off, theirs_off = (a.float() - truth).norm(), (b.float() - truth).norm()
        assert ours_off <= 1.2 * theirs_off + 1e-6
        assert ours_off <= 2**-7 * truth.norm()


def test_the_head_keeps_rows_and_columns_apart():
    leaves, labels = case(ignored=0.3)
    hidden, weight, bias = (leaf.detach() for leaf in leaves)
    grid = LocalHead().token_losses(hidden[:36].view(4, 9, HIDDEN), weight, labels[:36].view(4, 9), bias, -100, 5)
    expected = reference(hidden, weight, labels, bias)[:36].view(4, 9)
    torch.testing.assert_close(grid, expected, atol=2e-6, rtol=1e-5)


class Memory(TorchDispatchMode):
    """Bytes of all storages made since it was entered and still alive: now, and at most. Shapes of what was made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.shapes.add(tuple(tensor.shape))
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


ROWS, SCORED, CHUNK, WIDE, NARROW = 32768, 2048, 8, 8000, 4


def long_row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, NARROW, generator=generator).requires_grad_()
    weight = torch.randn(WIDE, NARROW, generator=generator).requires_grad_()
    labels = torch.full((ROWS,), -100)
    labels[-SCORED:] = torch.randint(0, WIDE, (SCORED,), generator=generator)
    return hidden, weight, labels


def test_a_row_of_32k_tokens_never_holds_its_logits():
    """All logits would be 1000 MiB, those of scored tokens 62; a chunk of them is 1/4 MiB, all else a few."""
    hidden, weight, labels = long_row()
    with Memory() as memory:
        linear_token_losses(hidden, weight, labels, chunk=CHUNK).sum().backward()
    assert memory.peak < 8 * 2**20
    assert memory.peak > CHUNK * WIDE * 4


def test_the_measure_sees_logits_that_are_whole():
    """The counterpart of the test before, on its scored tokens alone."""
    hidden, weight, labels = long_row()
    with Memory() as memory:
        reference(hidden[-SCORED:], weight, labels[-SCORED:])
    assert memory.peak >= SCORED * WIDE * 4


def test_a_frozen_head_gets_no_gradient_formed():
    leaves, labels = case()
    expected = run(reference, leaves, labels)[1]
    frozen = [leaves[0].detach().requires_grad_(), leaves[1].detach(), leaves[2].detach()]
    with Memory() as memory:
        ours = run(linear_token_losses, frozen, labels)
    assert (VOCAB, HIDDEN) not in memory.shapes
    torch.testing.assert_close(ours[1], expected, atol=2e-6, rtol=1e-5)
    with Memory() as memory:
        run(linear_token_losses, leaves, labels)
    assert (VOCAB, HIDDEN) in memory.shapes  # the shape it must not see is there when wanted


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_frozen_heads_backward_computes_no_logits_again(chunk):
    leaves, labels = case()
    frozen = [leaves[0].detach().requires_grad_(), leaves[1].detach(), leaves[2].detach()]
    losses = linear_token_losses(frozen[0], frozen[1], labels, frozen[2], chunk=chunk)
    with Memory() as memory:
        losses.sum().backward()
    assert not any(shape[-1:] == (VOCAB,) for shape in memory.shapes)
    losses = linear_token_losses(leaves[0], leaves[1], labels, leaves[2], chunk=chunk)
    with Memory() as memory:
        losses.sum().backward()
    assert any(shape[-1:] == (VOCAB,) for shape in memory.shapes)  # where the head trains there is no other way


def test_a_frozen_heads_bf16_rows_round_no_worse_than_the_reference():
    exact_leaves, labels = case()
    hidden, weight, bias = (leaf.detach().bfloat16() for leaf in exact_leaves)
    frozen = [hidden.requires_grad_(), weight, bias]
    exact = run(reference, [hidden.detach().float().requires_grad_(), weight.float(), bias.float()], labels)[1]
    ours, theirs = (run(function, frozen, labels)[1] for function in (linear_token_losses, reference))
    assert (ours.float() - exact).norm() <= 1.3 * (theirs.float() - exact).norm()  # one more rounding: upstream's


def test_a_known_count_changes_nothing():
    leaves, labels = case()
    known = run(linear_token_losses, leaves, labels, count=int((labels != -100).sum()))
    assert all(torch.equal(a, b) for a, b in zip(run(linear_token_losses, leaves, labels), known))


def test_without_gradients_nothing_but_logits_is_computed():
    leaves, labels = case()
    frozen = [leaves[0], leaves[1].detach(), leaves[2].detach()]
    with torch.no_grad(), Memory() as memory:
        linear_token_losses(frozen[0], frozen[1], labels, frozen[2])
    with Memory() as with_gradient:
        linear_token_losses(frozen[0], frozen[1], labels, frozen[2])
    assert memory.peak < with_gradient.peak
