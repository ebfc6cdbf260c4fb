"""LM head and loss on an NVIDIA card: right at real sizes, without waiting for the device, and at what speed.

`python tests/device/test_cuda_head.py` prints the tables; pytest runs the checks alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from erniekit.kernels.cross_entropy import linear_cross_entropy
from erniekit.kernels.token_losses import linear_token_losses

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(tokens: int, vocab: int, width: int, ignored: float = 0.0, head: bool = True, seed: int = 0) -> Case:
    """Hidden states, weight, labels with a trained model's spread: the label's logit is about 15, among the highest."""
    torch.manual_seed(seed)
    weight = torch.randn(vocab, width, device="cuda").mul_(2 / width**0.5).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    hidden = (torch.randn(tokens, width, device="cuda") + weight[labels].float() * 3.75).bfloat16()
    labels[torch.rand(tokens, device="cuda") < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(head), labels


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


# --- timings ---


def milliseconds(call: Callable[[], Any], times: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    taken = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds, and GiB above what was there."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return milliseconds(call), (torch.cuda.max_memory_allocated() - before) / 2**30


def line(name: str, call: Callable[[], str]) -> None:
    """One line of a table; what fails says so and the rest goes on."""
    try:
        print(f"{name:<58} {call()}", flush=True)
    except Exception as problem:
        print(f"{name:<58} FAILED {type(problem).__name__}: {str(problem)[:160]}", flush=True)
    torch.cuda.empty_cache()


def speed(call: Callable[[], Any], gigabytes: float) -> str:
    ms = milliseconds(call)
    return f"{ms:7.3f} ms {gigabytes / ms:6.2f} TB/s"


def kernel_table(rows: int, vocab: int, variants: list[dict[str, Any]]) -> None:
    from erniekit.kernels.triton.softmax import softmax_gradient_, softmax_rows

    logits = torch.randn(rows, vocab, device="cuda").mul_(2).bfloat16()
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    norms = torch.full((rows,), 12.0, device="cuda")
    moved = 2 * logits.numel() * 2 / 1e9  # read once, written once
    print(f"--- kernel on {rows} x {vocab}")
    for v in variants:
        line(f"loss + gradient {v}", partial(speed, partial(softmax_rows, logits, targets, 1e-4, True, v), moved))
    for v in ({}, dict(num_warps=16, LANES=4096, DEPTH=2)):
        known = partial(softmax_gradient_, logits, targets, norms, norms, 1e-4, v)
        line(f"gradient, norms known {v}", partial(speed, known, moved))
        line(f"loss alone {v}", partial(speed, partial(softmax_rows, logits, targets, launch=v), moved / 2))
    line("copy of the logits", partial(speed, logits.clone, moved))


def variants() -> list[dict[str, Any]]:
    shapes = ((8, 2048, 4), (8, 2048, 2), (16, 4096, 2), (16, 4096, 4), (32, 8192, 1), (32, 8192, 2), (4, 1024, 8))
    out: list[dict[str, Any]] = [dict(num_warps=w, LANES=lanes, DEPTH=depth) for w, lanes, depth in shapes]
    out += [dict(FIRST="", SECOND="", **v) for v in (out[0], out[2])]
    out += [dict(per_sm=n, **out[0]) for n in (1, 2, 3)]
    return [*out, dict(STAGES=3, **out[1])]


def three_products(hidden: torch.Tensor, weight: torch.Tensor) -> Callable[[], None]:
    """8192 rows at a time at most, as 32K tokens' logits would not all be wanted at once."""
    x_all, w = hidden.detach(), weight.detach()
    rows = min(8192, len(x_all))
    logits = torch.empty(rows, w.shape[0], device="cuda", dtype=torch.bfloat16).normal_()

    def run() -> None:
        for at in range(0, len(x_all), rows):
            x = x_all[at : at + rows]
            torch.mm(x, w.t(), out=logits)
            logits @ w
            logits.t() @ x

    return run


def step(kind: str, hidden: Any, weight: Any, labels: Any, chunk: int, count: int | None) -> None:
    hidden.grad = weight.grad = None
    if kind == "tokens":
        linear_token_losses(hidden, weight, labels, chunk=chunk, count=count).sum().backward()
    elif kind == "no_grad":
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, labels, chunk=chunk, count=count)
    elif kind == "early":
        linear_cross_entropy(hidden, weight, labels, chunk=chunk, count=count, scale=1e-4).backward()
    else:
        (linear_cross_entropy(hidden, weight, labels, chunk=chunk, count=count) / 1e4).backward()


def loss_table(tokens: int, vocab: int, width: int) -> None:
    print(f"--- {tokens} tokens x {vocab}, hidden {width}: forward + backward, ms, GiB above inputs")

    def products() -> str:
        return f"{milliseconds(three_products(*case(tokens, vocab, width)[:2])):7.2f}"

    def show(kind: str, chunk: int, masked: float = 0.0, head: bool = True) -> str:
        x, w, y = case(tokens, vocab, width, masked, head)
        count = int((y != -100).sum())
        ms, gib = measured(lambda: step(kind, x, w, y, chunk, count))
        return f"{ms:7.2f} {gib:6.2f}"

    line("three products alone", products)
    for chunk in (1024, 2048, 4096, 8192):
        line(f"early, {2 * chunk} rows", partial(show, "early", chunk))
    line("late, 4096 rows", partial(show, "late", 2048))
    line("late, 8192 rows", partial(show, "late", 4096))
    line("early, 4096 rows, half the labels masked", partial(show, "early", 2048, 0.5))
    line("early, 4096 rows, frozen head", partial(show, "early", 2048, head=False))
    if tokens <= 8192:
        line("each token's loss, 4096 rows", partial(show, "tokens", 2048))
        line("each token's loss, 4096 rows, frozen head", partial(show, "tokens", 2048, head=False))
    line("no gradient, 4096 rows", partial(show, "no_grad", 2048))


def main() -> None:
    for size in SIZES:
        for kind in ("late", "early", "late frozen", "tokens", "tokens frozen"):
            for chunk in (128, 4096):
                line(f"error {size} chunk {chunk} {kind}", partial(told, size, chunk, kind))
    for ignored in (0.0, 0.5):
        line(f"without waiting, {ignored} ignored", partial(done, test_nobody_waits_for_the_device, ignored))
    line("bit for bit", partial(done, test_gradients_repeat_bit_for_bit))
    kernel_table(4096, 103424, variants())
    kernel_table(8192, 32000, variants()[:3])
    for shape in ((8192, 103424, 1024), (32768, 103424, 1024), (8192, 103424, 2560), (16384, 32000, 5120)):
        loss_table(*shape)


def told(size: tuple[int, int, int], chunk: int, kind: str) -> str:
    return " ".join(f"{name} {error:.2e}" for name, error in errors(*size, chunk, kind).items())


def done(check: Callable[..., None], *given: Any) -> str:
    check(*given)
    return "yes"


if __name__ == "__main__":
    main()
