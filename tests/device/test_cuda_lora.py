"""A linear and its LoRA pairs as one op, on a card: bf16 against fp32 with the same numbers, and what it costs.

Run by `pytest -m cuda`, or as a script for the table of times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.lora_linear import in_one_op
from erniekit.lora.layers import SHARED, LoRALinear, Pair, Parts
from erniekit.models.layers.linear import FusedLinear

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

RANK = 32
QKV = (("q_proj", 2560), ("k_proj", 512), ("v_proj", 512))
SHAPES: dict[str, tuple[int, Parts]] = {
    "qkv": (2560, QKV),
    "out": (2560, (("o_proj", 2560),)),
    "gate_up": (2560, (("gate_proj", 3072), ("up_proj", 3072))),
    "down": (3072, (("down_proj", 2560),)),
}
GROUPS = {"each part": None, "two parts": ("q_proj", "v_proj"), "one A for all": (SHARED,)}


class InPieces(LoRALinear):
    """The base, then each pair's own products, left to torch."""

    def _base_is_itself(self) -> bool:
        return False


def adapted(
    width: int,
    parts: Parts,
    names: tuple[str, ...] | None = None,
    scales: tuple[float, ...] = (2.0,),
    bias: bool = False,
    kind: type[LoRALinear] = LoRALinear,
) -> LoRALinear:
    """bf16, the base frozen; names: of the pairs, None for one on each part."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = FusedLinear(width, parts, bias).to(torch.bfloat16).requires_grad_(False)
    groups = {SHARED: parts} if names == (SHARED,) else {p: ((p, n),) for p, n in parts if not names or p in names}
    pairs = {}
    for i, (name, group) in enumerate(groups.items()):
        pairs[name] = Pair(group, RANK, scales[i % len(scales)], base.weight)
        nn.init.normal_(pairs[name].A, std=width**-0.5)
        nn.init.normal_(pairs[name].B, std=RANK**-0.5)
    return kind(base, parts, pairs)


def answers(module: LoRALinear, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of x and of every A and B."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.lora.parameters()], upstream)]


def in_fp32(module: LoRALinear, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """From the merged weight, part by part."""
    x = x.float().requires_grad_()
    factors = [p.detach().float().requires_grad_() for p in module.lora.parameters()]
    updates = {}
    for pair, A, B in zip(module.pairs().values(), factors[::2], factors[1::2]):
        for (part, _), b in zip(pair.parts, B.split([n for _, n in pair.parts])):
            updates[part] = pair.scale * b @ A
    weights = module.weight.float().split([n for _, n in module.parts])
    merged = torch.cat([w + updates.get(part, 0.0) for (part, _), w in zip(module.parts, weights)])
    y = F.linear(x, merged, None if module.base.bias is None else module.base.bias.float())
    return [y.detach(), *torch.autograd.grad(y, [x, *factors], upstream.float())]


@pytest.mark.parametrize(
    ("group", "scales", "bias", "compiled"),
    [
        ("each part", (2.0,), False, False),
        ("each part", (0.7, 2.0, 1.3), True, False),
        ("two parts", (0.7,), True, False),
        ("one A for all", (2.0,), False, False),
        ("each part", (2.0,), False, True),
        ("two parts", (0.7, 1.3), True, True),
        ("one A for all", (0.7,), True, True),
    ],
)
def test_bf16_is_within_two_percent_of_fp32(group: str, scales: tuple[float, ...], bias: bool, compiled: bool) -> None:
    module = adapted(2560, QKV, GROUPS[group], scales, bias)
    x = torch.randn(1, 4096, 2560, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(1, 4096, 3584, device="cuda", dtype=torch.bfloat16)
    assert in_one_op(x, module.base.stored(), module.base.bias, module.row_updates())
    if compiled:
        module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)
    names = ["y", "dx", *(name for name, _ in module.lora.named_parameters())]
    for name, got, want in zip(names, answers(module, x, upstream), in_fp32(module, x, upstream), strict=True):
        assert got.dtype == torch.bfloat16
        assert ((got.float() - want).norm() / want.norm()).item() < 0.02, name


def test_it_keeps_nothing_as_wide_as_its_output() -> None:
    """Of 8192 tokens: the output itself, the pairs' low-rank rows, and 8 MiB for the stacked pairs and cuBLAS."""
    module = adapted(2560, QKV)
    x = torch.randn(8192, 2560, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module(x)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    held = torch.cuda.memory_allocated() - before
    assert held <= 2 * (y.numel() + 8192 * 3 * RANK) + (8 << 20)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median of the kernels alone, replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del kept
    return statistics.median(times)


def timed(kind: type[LoRALinear], width: int, parts: Parts, tokens: int) -> float:
    """Forward and backward, compiled."""
    torch._dynamo.reset()
    module = adapted(width, parts, kind=kind)
    x = torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(1, tokens, module.weight.shape[0], device="cuda", dtype=torch.bfloat16)
    run = torch.compile(module, fullgraph=True, dynamic=False)
    inputs = [x, *module.lora.parameters()]
    return milliseconds(lambda: torch.autograd.grad(run(x), inputs, upstream))


def frozen(width: int, rows: int, tokens: int) -> float:
    """The two products that no adapter can do without."""
    x, weight, grad = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, width), (rows, width), (tokens, rows))
    )
    return milliseconds(lambda: (F.linear(x, weight), grad @ weight))


def orders(width: int, rows: int, tokens: int, rank: int) -> tuple[float, float]:
    """Forward alone: the update added to the base's answer, and the base's answer added to the update."""
    x, weight, A, B = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, width), (rows, width), (rank, width), (rows, rank))
    )
    base_first = milliseconds(lambda: F.linear(x, weight).addmm_(F.linear(x, A), B.t(), alpha=2.0))

    def update_first() -> torch.Tensor:
        low = F.linear(x, A)
        return x.new_empty(tokens, rows).addmm_(low, B.t(), beta=0, alpha=2.0).addmm_(x, weight.t())

    return base_first, milliseconds(update_first)


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
    start = time.time()
    table()
    print(f"{time.time() - start:.0f} s")
    if "--test" in sys.argv:
        sys.exit(pytest.main([__file__, "-q", "--no-header", "-p", "no:cacheprovider", "--override-ini=addopts="]))
