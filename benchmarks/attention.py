"""Times of the attention kernels on an NVIDIA card: rows of one document, packs, and pairs that share a prompt.

python benchmarks/attention.py
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from device_cases.attention import attend, bounds_of, inputs, kernels, shared_prompt
from timing import line, queued_milliseconds

from erniekit.kernels.packed_attention import packs_of


def measure(
    kernel: str, L: int, heads: int, kv: int, bounds: Any = None, longest: Any = None, shared: Any = None
) -> str:
    qkv, grad, cos, sin = inputs(1, L, heads, kv)
    packs = None if bounds is None else packs_of(bounds, longest, shared, L)
    x = qkv.requires_grad_()
    with torch.no_grad():
        forward = queued_milliseconds(lambda: attend(x, cos, sin, heads, kv, False, packs, kernel))

    def step() -> None:
        x.grad = None
        attend(x, cos, sin, heads, kv, False, packs, kernel).backward(grad)

    return f"fwd {forward:.3f} ms fwd+bwd {queued_milliseconds(step):.3f} ms"


def log_normal(total: int, mean: int, seed: int = 0) -> list[int]:
    torch.manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        n = int(torch.empty(()).log_normal_(0.0, 0.5).item() * mean * 0.88) + 1
        lengths.append(min(n, total - sum(lengths)))
    return lengths


def main() -> None:
    for L, heads, kv in ((8192, 16, 2), (8192, 20, 4), (32768, 16, 2)):
        for kernel in kernels(packed=False):
            line(f"one document {L} {heads}/{kv} {kernel}:", partial(measure, kernel, L, heads, kv))
    for L, heads, kv in ((8192, 16, 2), (32768, 16, 2), (8192, 20, 4)):
        lengths = log_normal(L, 1000)
        for kernel in kernels(packed=True):
            name = f"pack {L} of {len(lengths)} {heads}/{kv} {kernel}:"
            line(name, partial(measure, kernel, L, heads, kv, bounds_of(lengths), max(lengths)))
    bounds, longest, shared, tokens = shared_prompt([(3072, 512, 512)] * 4)
    for kernel in kernels(packed=True):
        line(f"4 pairs {tokens} {kernel}:", partial(measure, kernel, tokens, 16, 2, bounds, longest, shared))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
