"""LM head and loss on an NVIDIA card: right at real sizes, without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_cases.head import case

from erniekit.kernels.cross_entropy import linear_cross_entropy
from erniekit.kernels.token_losses import linear_token_losses

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]


def truth(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor) -> list[Any]:
    """Losses [T], dx, dW in fp32, 250 rows at a time."""
    x_all, w = hidden.detach().float(), weight.detach().float()
    losses, grad_x, grad_w = torch.zeros_like(upstream), torch.zeros_like(x_all), torch.zeros_like(w)
    for at in range(0, len(x_all), 250):
        span = slice(at, at + 250)
        logits = x_all[span] @ w.t()
        losses[span] = torch.nn.functional.cross_entropy(logits, labels[span], ignore_index=-100, reduction="none")
        grad = logits.softmax(-1)
        kept = (labels[span] != -100).float()
        grad.scatter_add_(1, labels[span].clamp(min=0)[:, None], -torch.ones_like(kept)[:, None])
        grad *= (kept * upstream[span])[:, None]
        grad_x[span] = grad @ w
        grad_w += grad.t() @ x_all[span]
    return [losses, grad_x, grad_w]


def off(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


def errors(tokens: int, vocab: int, width: int, chunk: int, kind: str, ignored: float = 0.4) -> dict[str, float]:
    """kind: late or early (when the sum is divided by the tokens), or tokens (each its own upstream)."""
    frozen = kind.endswith("frozen")
    hidden, weight, labels = case(tokens, vocab, width, ignored, head=not frozen)
    count = int((labels != -100).sum())
    upstream = torch.full((tokens,), 1 / 3000, device="cuda")
    if kind.startswith("tokens"):
        upstream = torch.randn(tokens, device="cuda")
    exact = truth(hidden, weight, labels, upstream)
    if kind.startswith("tokens"):
        losses = linear_token_losses(hidden, weight, labels, chunk=chunk, count=count)
        told = off(losses, exact[0])
        losses.backward(upstream)
    else:
        early = kind.startswith("early")
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk, count=count, scale=1 / 3000 if early else None)
        loss = loss if early else loss / 3000
        told = abs(float(loss) / (float(exact[0].sum()) / 3000) - 1)
        loss.backward()
    assert hidden.grad is not None
    out = {"loss": told, "dx": off(hidden.grad, exact[1])}
    # A factor rounded to bf16 is off by 0.14 % for all numbers alike.
    out["dx length"] = abs(float((hidden.grad.float() * exact[1]).sum() / exact[1].square().sum()) - 1)
    if weight.grad is not None:
        out["dW"] = off(weight.grad, exact[2])
    return out


SIZES = [(1000, 103424, 1024), (777, 32001, 256)]


@pytest.mark.parametrize("kind", ["late", "early", "late frozen", "tokens", "tokens frozen"])
@pytest.mark.parametrize("chunk", [128, 4096])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_and_gradients_are_fp32s_to_rounding(size: tuple[int, int, int], chunk: int, kind: str) -> None:
    found = errors(*size, chunk, kind)
    # Logits, their gradient and the answers are each rounded to 8 bits. A logit of 15 is so off by 0.02, 1 % of one
    # token's loss, which a sum over tokens averages out.
    assert found["loss"] < (0.015 if kind.startswith("tokens") else 1e-3), found
    assert found["dx"] < 0.01, found
    assert found.get("dW", 0.0) < 0.01, found
    assert found["dx length"] < 1e-3, found


@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_nobody_waits_for_the_device(ignored: float) -> None:
    hidden, weight, labels = case(600, 5000, 128, ignored)
    count = int((labels != -100).sum())
    upstream = torch.randn(600, device="cuda")

    def both() -> None:
        linear_cross_entropy(hidden, weight, labels, chunk=128, count=count, scale=0.1).backward()
        (linear_cross_entropy(hidden, weight, labels, chunk=128, count=count) / 7).backward()
        linear_token_losses(hidden, weight, labels, chunk=128, count=count).backward(upstream)

    both()  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_repeat_bit_for_bit() -> None:
    answers = []
    for _ in range(2):
        hidden, weight, labels = case(700, 5000, 128, 0.3)
        linear_cross_entropy(hidden, weight, labels, chunk=100).backward()
        answers.append((hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*answers))
