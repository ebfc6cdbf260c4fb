"""The fused head + cross-entropy against the two-line reference: loss, every gradient, and what is never formed."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.kernels.cross_entropy import linear_cross_entropy, reference

TOKENS, HIDDEN, VOCAB = 37, 24, 53


def case(dtype: torch.dtype = torch.float32, bias: bool = True, ignored: float = 0.3):
    generator = torch.Generator().manual_seed(5)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight = rand(TOKENS, HIDDEN).to(dtype), (0.3 * rand(VOCAB, HIDDEN)).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < ignored] = -100
    leaves = [hidden, weight, rand(VOCAB).to(dtype) if bias else None]
    return [t.requires_grad_() if t is not None else None for t in leaves], labels


def run(function, leaves, labels, scale: float = 1.0, **options):
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    hidden, weight, bias = leaves
    loss = function(hidden, weight, labels, bias, **options)
    (loss * scale).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("chunk", [1, 7, 26, 1000])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_loss_and_gradients_equal_the_reference_for_any_chunk(chunk, bias):
    leaves, labels = case(bias=bias)
    ours = run(linear_cross_entropy, leaves, labels, scale=1 / 26, chunk=chunk)
    for a, b in zip(ours, run(reference, leaves, labels, scale=1 / 26)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_ignored_tokens_get_no_gradient_and_all_kept_ones_do():
    leaves, labels = case()
    _, grad_hidden, _, _ = run(linear_cross_entropy, leaves, labels)
    assert torch.equal(grad_hidden.abs().sum(-1) > 0, labels != -100)


def test_another_ignore_value_is_honoured():
    leaves, labels = case()
    ours = run(linear_cross_entropy, leaves, labels.masked_fill(labels == -100, 0), ignore=0)
    theirs = run(reference, leaves, labels.masked_fill(labels == -100, 0), ignore=0)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_with_nothing_to_train_is_zero_with_zero_gradient(dtype):
    leaves, labels = case(dtype)
    hidden, weight, bias = leaves
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss) == 0.0
    # A rank without labels has a gradient of everything all the same: others reduce theirs with it.
    assert not any(bool(leaf.grad.any()) for leaf in leaves)


def test_bf16_gradients_round_no_worse_than_the_reference():
    """Both round logits and dlogits to bf16 (2^-9 relative); ours sums chunks in fp32, so it may only be nearer."""
    exact_leaves, labels = case(torch.float32)
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in exact_leaves]
    exact = run(reference, [leaf.detach().float().requires_grad_() for leaf in leaves], labels, scale=1 / 26)
    ours = run(linear_cross_entropy, leaves, labels, scale=1 / 26, chunk=7)
    theirs = run(reference, leaves, labels, scale=1 / 26)
    assert ours[0].dtype == torch.float32
    for a, b, truth in zip(ours, theirs, exact):
        ours_off, theirs_off = (a.float() - truth).norm(), (b.float() - truth).norm()
        assert ours_off <= 1.2 * theirs_off + 1e-6
        assert ours_off <= 2**-7 * truth.norm()


def test_bf16_scaling_by_one_over_tokens_is_not_rounded():
    """1/3000 in bf16 is off by 0.1 %: every gradient below the head would be too."""
    leaves, labels = case(torch.bfloat16)
    whole = run(linear_cross_entropy, leaves, labels)[1].float()
    scaled = run(linear_cross_entropy, leaves, labels, scale=1 / 3000)[1].float()
    assert float((scaled.norm() * 3000 / whole.norm() - 1).abs()) < 3e-4  # single roundings average out


class Made(TorchDispatchMode):
    """Notes every tensor an operator makes: its name and shape. Views make nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.names.append(str(func))
            self.shapes.append(out.shape)
        return out


def test_logits_are_never_whole_in_memory():
    leaves, labels = case(ignored=0.0)
    hidden, weight, bias = leaves
    with Made() as made:
        linear_cross_entropy(hidden, weight, labels, bias, chunk=8).backward()
    logits_like = [shape[0] for shape in made.shapes if len(shape) == 2 and shape[1] == VOCAB]
    assert max(logits_like) == 8


def test_a_head_that_trains_does_form_its_gradient():
    """The counterpart of the next test: the shape it must not see is there when wanted."""
    leaves, labels = case()
    with Made() as made:
        run(linear_cross_entropy, leaves, labels)
    assert torch.Size([VOCAB, HIDDEN]) in made.shapes


def test_a_frozen_head_gets_no_gradient_formed():
    leaves, labels = case()
    hidden, weight, bias = leaves
    expected = run(reference, leaves, labels)[1]
    frozen = [hidden.detach().requires_grad_(), weight.detach(), bias.detach()]
    with Made() as made:
        linear_cross_entropy(frozen[0], frozen[1], labels, frozen[2]).backward()
    assert torch.Size([VOCAB, HIDDEN]) not in made.shapes
    torch.testing.assert_close(frozen[0].grad, expected, atol=1e-6, rtol=1e-6)


def test_evaluation_forms_no_gradient_at_all():
    leaves, labels = case()
    hidden, weight, bias = leaves
    with torch.no_grad(), Made() as made:
        loss = linear_cross_entropy(hidden, weight, labels, bias)
    assert not any("_softmax" in name and "log" not in name for name in made.names)
    assert torch.Size([VOCAB, HIDDEN]) not in made.shapes
    assert float(loss) == pytest.approx(float(reference(hidden, weight, labels, bias).detach()), rel=1e-6)


def test_a_known_count_changes_nothing():
    leaves, labels = case()
    asked = run(linear_cross_entropy, leaves, labels)
    known = run(linear_cross_entropy, leaves, labels, count=int((labels != -100).sum()))
    assert all(torch.equal(a, b) for a, b in zip(asked, known))


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_given_before_equals_one_multiplied_after(chunk, dtype):
    """In bf16 the scaled gradient of the logits is rounded instead of the unscaled: 2^-9 of each, once."""
    leaves, labels = case(dtype)
    before = run(linear_cross_entropy, leaves, labels, scale=1.0, chunk=chunk)
    scaled = run(lambda *a, **k: linear_cross_entropy(*a, **k, scale=1 / 3000), leaves, labels, chunk=chunk)
    for a, b in zip(scaled, before):
        assert a.dtype == b.dtype
        near = 1e-6 if a.dtype == torch.float32 else 2**-7
        assert float((a.float() * 3000 - b.float()).norm()) <= near * float(b.float().norm())


def test_a_scaled_loss_is_not_scaled_again_and_goes_backward_once():
    leaves, labels = case()
    hidden, weight, bias = leaves
    with pytest.raises(RuntimeError, match="scaled again"):
        (2 * linear_cross_entropy(hidden, weight, labels, bias, scale=0.1)).backward()
    loss = linear_cross_entropy(hidden, weight, labels, bias, scale=0.1) + hidden.sum() * 0.0
    loss.backward(retain_graph=True)  # as a term of a sum
    with pytest.raises(RuntimeError, match="backward once"):
        loss.backward()


def test_gradients_that_are_final_are_handed_on_without_another_pass():
    """Of the head's size backward makes nothing: the gradient is the tensor that forward formed."""
    leaves, labels = case()
    hidden, weight, bias = leaves
    loss = linear_cross_entropy(hidden, weight, labels, bias, scale=0.1)
    with Made() as made:
        loss.backward()
    assert torch.Size([VOCAB, HIDDEN]) not in made.shapes
    loss = linear_cross_entropy(hidden, weight, labels, bias) * 0.1
    with Made() as made:
        loss.backward()
    assert torch.Size([VOCAB, HIDDEN]) in made.shapes
