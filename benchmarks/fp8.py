"""Times of products with a frozen base in fp8 against bf16's, on a Hopper card, at the 21B-A3B shapes.

python benchmarks/fp8.py
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from device_cases.fp8 import RANK, E, H, K, W, block, expert_mlp, normal, packed, routed
from timing import milliseconds

from erniekit.kernels import fp8_product as fp8
from erniekit.kernels.moe_permute import Order
from erniekit.kernels.quantised_rows import quantised
from erniekit.kernels.stored import kind_of

TOKENS = 8192


def product_times(label: str, weight: torch.Tensor, rows: int, ends: torch.Tensor | None) -> None:
    """Forward and to the input, ms in bf16, in fp8 with the rounding of rows and the transposed weight, and how many
    times as fast."""
    held, shown = packed(weight), []
    kind, (out, width) = kind_of(held), weight.shape[-2:]
    for way, second, count in (("forward", weight.transpose(-2, -1), width), ("to input", weight, out)):
        x, turned = normal(rows, count), way == "to input"
        if ends is None:
            plain = partial(torch.mm, x, second)
            small = partial(kind.turned_product if turned else kind.product, x, held)
        else:
            plain = partial(F.grouped_mm, x, second, offs=ends)
            small = partial(kind.turned_grouped if turned else kind.grouped, x, held, ends, x.dtype)
        a, b = milliseconds(plain), milliseconds(small)
        shown.append(f"{way} {a:6.3f} {b:6.3f} {a / b:5.2f}")
    moved = milliseconds(partial(fp8.transposed, held.data))
    print(f"  {label:16s} {'   '.join(shown)}   transposed {moved:6.3f}", flush=True)


def take_times(order: Order) -> None:
    from erniekit.kernels.triton import expert_rows

    x, lows = normal(TOKENS, H), [(normal(E, RANK, H), 1.0) for _ in range(2)]
    x8, xs = quantised(x)
    a = milliseconds(lambda: expert_rows.take(x, order.row_of, K, order.ends, lows))
    b = milliseconds(lambda: expert_rows.take_fp8(x, (x8, xs), order.row_of, K, order.ends, lows))
    print(f"  taking {TOKENS * K} rows with two low ranks: bf16 {a:6.3f}, fp8 {b:6.3f}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    order, weights = routed(TOKENS)
    rows = TOKENS * K
    print("products: ms in bf16, in fp8, times as fast")
    for name, out, width in (("gate_up", 2 * W, H), ("down", H, W)):
        product_times(f"experts {name}", normal(E, out, width, std=0.02), rows, order.ends)
    for name, out, width in (("qkv", 3584, H), ("out", H, H), ("shared gate_up", 6144, H), ("shared down", H, 3072)):
        product_times(name, normal(out, width, std=0.02), TOKENS, None)
    print("rows to fp8: ms, TB/s")
    for count, width in ((TOKENS, H), (rows, W), (rows, 2 * W), (TOKENS, 3584)):
        took = milliseconds(partial(quantised, normal(count, width)))
        print(f"  {count:6d} x {width:5d} {took:6.3f} {3 * count * width / took / 1e9:5.2f}", flush=True)
    take_times(order)
    torch.cuda.empty_cache()
    x, order, weights, gate_up, down, updates = block(TOKENS)
    upstream, leaves = normal(*x.shape), [x, weights, *(t for u in updates for t in u[:2])]
    for label, base in (("bf16", (gate_up, down)), ("fp8", (packed(gate_up), packed(down)))):

        def both(base: Any = base) -> Any:
            return torch.autograd.grad(expert_mlp(x, order, weights, *base, *updates), leaves, upstream)

        print(f"the expert block, forward and backward, {label}: {milliseconds(both):6.3f} ms", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
