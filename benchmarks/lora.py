"""Times of a linear and its LoRA pairs on an NVIDIA card: as one op, in pieces, and the frozen products alone.

python benchmarks/lora.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from device_cases.lora import QKV, RANK, adapted
from timing import milliseconds

from erniekit.lora.layers import LoRALinear, Parts

SHAPES: dict[str, tuple[int, Parts]] = {
    "qkv": (2560, QKV),
    "out": (2560, (("o_proj", 2560),)),
    "gate_up": (2560, (("gate_proj", 3072), ("up_proj", 3072))),
    "down": (3072, (("down_proj", 2560),)),
}


class InPieces(LoRALinear):
    """The base, then each pair's own products, left to torch."""

    def _base_is_itself(self) -> bool:
        return False


def timed(kind: type[LoRALinear], width: int, parts: Parts, tokens: int) -> float:
    """Forward and backward, compiled."""
    torch._dynamo.reset()
    module = adapted(width, parts, kind=kind)
    x = torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(1, tokens, module.weight.shape[0], device="cuda", dtype=torch.bfloat16)
    run = torch.compile(module, fullgraph=True, dynamic=False)
    inputs = [x, *module.lora.parameters()]
    return milliseconds(lambda: torch.autograd.grad(run(x), inputs, upstream), graph=True)


def frozen(width: int, rows: int, tokens: int) -> float:
    """The two products that no adapter can do without."""
    x, weight, grad = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, width), (rows, width), (tokens, rows))
    )
    return milliseconds(lambda: (F.linear(x, weight), grad @ weight), graph=True)


def orders(width: int, rows: int, tokens: int, rank: int) -> tuple[float, float]:
    """Forward alone: the update added to the base's answer, and the base's answer added to the update."""
    x, weight, A, B = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, width), (rows, width), (rank, width), (rows, rank))
    )
    base_first = milliseconds(lambda: F.linear(x, weight).addmm_(F.linear(x, A), B.t(), alpha=2.0), graph=True)

    def update_first() -> torch.Tensor:
        low = F.linear(x, A)
        return x.new_empty(tokens, rows).addmm_(low, B.t(), beta=0, alpha=2.0).addmm_(x, weight.t())

    return base_first, milliseconds(update_first, graph=True)


def table(tokens: int = 8192) -> None:
    print(f"ms of forward + backward, {tokens} tokens, rank {RANK}; last: forward alone in two orders", flush=True)
    for name, (width, parts) in SHAPES.items():
        rows, rank = sum(n for _, n in parts), RANK * len(parts)
        try:
            pieces, one = (timed(kind, width, parts, tokens) for kind in (InPieces, LoRALinear))
            base_first, update_first = orders(width, rows, tokens, rank)
            print(
                f"{name:8} {width} -> {rows}: in pieces {pieces:.3f}, one op {one:.3f}, frozen products alone "
                f"{frozen(width, rows, tokens):.3f}; base first {base_first:.3f}, update first {update_first:.3f}",
                flush=True,
            )
        except Exception as problem:
            print(name, "FAILED", str(problem)[:300].replace("\n", " "), flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table()
