"""Times and memory of the LM head and its loss on an NVIDIA card: the softmax kernel, and whole losses at real sizes.

python benchmarks/head.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from device_cases.head import case
from timing import line, milliseconds

from erniekit.kernels.cross_entropy import linear_cross_entropy
from erniekit.kernels.token_losses import linear_token_losses


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds, and GiB above what was there."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return milliseconds(call, 5), (torch.cuda.max_memory_allocated() - before) / 2**30


def speed(call: Callable[[], Any], gigabytes: float) -> str:
    ms = milliseconds(call, 5)
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
        return f"{milliseconds(three_products(*case(tokens, vocab, width)[:2]), 5):7.2f}"

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
    kernel_table(4096, 103424, variants())
    kernel_table(8192, 32000, variants()[:3])
    for shape in ((8192, 103424, 1024), (32768, 103424, 1024), (8192, 103424, 2560), (16384, 32000, 5120)):
        loss_table(*shape)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
