"""The kernel of the head's loss in Triton's interpreter, against plain torch: alone, and in the losses that call it."""

from __future__ import annotations

import os

import pytest
import torch

from erniekit.kernels import cross_entropy, head_gradients, softmax, token_losses

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")

LAUNCHES = (dict(DEPTH=4, LANES=256), dict(DEPTH=2, LANES=16), dict(DEPTH=1, LANES=128, FIRST="", SECOND="", STAGES=2))


def truth(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logsumexp, the target's logit, softmax - onehot."""
    columns = logits.shape[1]
    here = (targets >= 0) & (targets < columns)
    onehot = torch.nn.functional.one_hot(targets.clamp(0, columns - 1), columns) * here[:, None]
    return logits.logsumexp(-1), (logits * onehot).sum(-1), logits.softmax(-1) - onehot


@pytest.mark.parametrize(("rows", "columns", "stride"), [(2, 53, 64), (1, 1, 1), (2, 300, 300), (0, 9, 9)])
def test_any_width_targets_of_other_ranks_and_rows_that_lie_apart(rows: int, columns: int, stride: int) -> None:
    from erniekit.kernels.triton.softmax import softmax_gradient_, softmax_rows

    torch.manual_seed(0)
    for dtype, near in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):  # bf16 keeps 8 bits of a result below 1
        room = (3 * torch.randn(rows, stride)).to(dtype)
        targets, upstream = torch.randint(-3, columns + 4, (rows,)), torch.randn(rows)
        norms, picked, grad = truth(room[:, :columns].float(), targets)
        for launch in LAUNCHES:
            logits = room.clone()[:, :columns]
            ours = softmax_rows(logits, targets, 0.5, False, launch)
            torch.testing.assert_close(ours, (norms, picked), atol=2e-6, rtol=1e-6)
            assert torch.equal(logits, room[:, :columns])
            ours = softmax_rows(logits, targets, 0.5, True, launch)
            torch.testing.assert_close(ours, (norms, picked), atol=2e-6, rtol=1e-6)
            torch.testing.assert_close(logits.float(), 0.5 * grad, atol=near, rtol=0)
            logits = softmax_gradient_(room.clone()[:, :columns], targets, norms, upstream, 2.0, launch)
            torch.testing.assert_close(logits.float(), 2 * upstream[:, None] * grad, atol=8 * near, rtol=0)


@pytest.mark.parametrize("train_head", [True, False])
def test_losses_as_on_a_card_equal_their_references(train_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary no multiple of anything, several chunks."""
    from erniekit.kernels.triton import softmax as kernel

    # What decides for the kernel is the device; here there is none.
    monkeypatch.setattr(softmax, "in_place", lambda device: True)
    monkeypatch.setattr(head_gradients, "in_place", lambda device: True)
    monkeypatch.setattr(kernel, "LAUNCH", kernel.LAUNCH | dict(DEPTH=2, LANES=32))
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(30, 16), 0.3 * torch.randn(53, 16), torch.randn(53)
    labels = torch.randint(0, 53, (30,))
    labels[::3] = -100
    upstream = torch.randn(30)
    leaves = [hidden.clone().requires_grad_(), *(t.clone().requires_grad_(train_head) for t in (weight, bias))]
    wanted = [t for t in leaves if t.requires_grad]
    for ours, theirs, given in (
        (cross_entropy.linear_cross_entropy, cross_entropy.reference, torch.tensor(1 / 20)),
        (token_losses.linear_token_losses, token_losses.reference, upstream),
    ):
        values = ours(leaves[0], leaves[1], labels, leaves[2], chunk=9)
        expected = theirs(leaves[0], leaves[1], labels, leaves[2])
        torch.testing.assert_close(values, expected, atol=3e-6, rtol=1e-6)
        got = torch.autograd.grad(values, wanted, given)
        for a, b in zip(got, torch.autograd.grad(expected, wanted, given)):
            torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-5)
