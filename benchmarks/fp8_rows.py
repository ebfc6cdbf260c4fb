"""Rows to fp8: how many rows a program and how many numbers a thread, on a Hopper card, at the 21B-A3B shapes.

python benchmarks/fp8_rows.py
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from device_cases.fp8 import E, H, K, W, normal, routed
from timing import milliseconds

from erniekit.kernels.triton import fp8_rows

TOKENS = 8192


def main() -> None:
    torch.manual_seed(0)
    order, _ = routed(TOKENS)
    rows = TOKENS * K
    factors = {width: torch.rand(E, width, device="cuda") for width in (H, 2 * W)}
    cases = {
        "tokens 8192 x 2560": partial(fp8_rows.quantise, normal(TOKENS, H)),
        "tokens 8192 x 6144": partial(fp8_rows.quantise, normal(TOKENS, 6144)),
        "tokens 8192 x 12288": partial(fp8_rows.quantise, normal(TOKENS, 12288)),
        "activations 49152 x 1536": partial(fp8_rows.quantise, normal(rows, W)),
        "gradients by expert, taken 49152 x 2560": partial(
            fp8_rows.quantise_by_expert, normal(TOKENS, H), factors[H], order.ends, order.row_of, K
        ),
        "gradients by expert 49152 x 3072": partial(
            fp8_rows.quantise_by_expert, normal(rows, 2 * W), factors[2 * W], order.ends
        ),
    }
    for name, call in cases.items():
        found = []
        for count in (1, 2, 4, 8):
            for most in (24, 48, 96, 192):
                fp8_rows.ROWS, fp8_rows.HELD = count, most
                found.append((milliseconds(call, graph=True), count, most))
        shown = "  ".join(f"{count}x{held} {took:.3f}" for took, count, held in sorted(found)[:6])
        print(f"{name:<42} {shown}   worst {max(found)[0]:.3f}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
