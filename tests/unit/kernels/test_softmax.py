"""Logsumexp, target and gradient of rows of logits in plain torch, against autograd; targets may be another rank's."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.softmax import loss_and_gradient, norms_and_targets, softmax_gradient


def rows(columns: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, columns, generator=generator), torch.tensor([0, 10, 4, -1, 11, 30])


@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_loss_and_its_gradient_are_cross_entropys(scale: float | None):
    logits, targets = rows()
    logits, targets = logits[:3].requires_grad_(), targets[:3]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (wanted,) = torch.autograd.grad(expected, logits)
    loss, grad = loss_and_gradient(logits.detach().clone(), targets, scale, True)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, wanted * (scale or 1.0), atol=1e-7, rtol=1e-6)
    assert loss_and_gradient(logits.detach(), targets, scale, False)[1] is None


def test_two_halves_of_a_row_make_its_gradient_with_the_whole_rows_norm():
    logits, targets = rows()
    targets = targets.clamp(0, 10)
    whole, picked, grad = norms_and_targets(logits.clone(), targets, gradient=True)
    upstream = torch.arange(6.0)
    parts = [(logits[:, :4], targets), (logits[:, 4:], targets - 4), (logits[:, :0], targets - 11)]
    told = [norms_and_targets(part.clone(), there)[:2] for part, there in parts]
    torch.testing.assert_close(torch.stack([n for n, _ in told]).logsumexp(0), whole)
    torch.testing.assert_close(sum(p for _, p in told), picked)
    joined = torch.cat([softmax_gradient(part.clone(), there, whole, upstream) for part, there in parts], dim=1)
    torch.testing.assert_close(joined, grad * upstream[:, None], atol=1e-6, rtol=1e-5)


def test_a_target_that_is_not_here_picks_nothing_and_takes_nothing_away():
    logits, targets = rows()
    _, picked, grad = norms_and_targets(logits.clone(), targets, gradient=True)
    assert (picked == 0).tolist() == [False, False, False, True, True, True]
    torch.testing.assert_close(grad.sum(-1), torch.tensor([0.0, 0, 0, 1, 1, 1]), atol=1e-6, rtol=0)
