"""Times of the expert block and its kernels at the 21B-A3B shapes, on an NVIDIA card.

    python benchmarks/experts.py [kernels zipf blocks router long]

Without words kernels, blocks and router. tune_experts.py looks for faster tiles.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import milliseconds

from erniekit.kernels.expert_mlp import Update, expert_mlp
from erniekit.kernels.moe_permute import Order, by_expert, combine, gather, weights_of_rows
from erniekit.kernels.stored import Stored

E, K, H, W, RANK = 64, 6, 2560, 1536, 32


def routing(tokens: int, kind: str) -> tuple[Order, torch.Tensor]:
    scores = -torch.log(-torch.log(torch.rand(tokens, E, device="cuda")))
    if kind == "zipf":
        scores += 1.3 * -torch.log(torch.arange(1, E + 1, device="cuda", dtype=torch.float32))
    weights, ids = scores.softmax(-1).topk(K)
    return by_expert(ids, E), (weights / weights.sum(-1, keepdim=True)).bfloat16()


def random(*shape: int, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * std).bfloat16()


def show(name: str, call: Callable[[], Any], gigabytes: float = 0.0, flops: float = 0.0, graph: bool = True) -> None:
    try:
        ms = milliseconds(call, graph=graph)
    except Exception as error:
        print(f"  {name:42s} FAILED {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
        return
    rate = f"{gigabytes / ms:6.2f} TB/s" if gigabytes else f"{flops / ms / 1e9:6.0f} TF" if flops else ""
    print(f"  {name:42s} {ms:7.3f} ms {rate}", flush=True)


class Sample:
    def __init__(self, tokens: int, kind: str) -> None:
        self.order, self.weights = routing(tokens, kind)
        self.x, self.dy = random(tokens, H), random(tokens, H)
        self.gate_up, self.down = random(E, 2 * W, H, std=0.02), random(E, H, W, std=0.02)
        self.updates = [
            Update(random(E, RANK, i, std=0.02), random(E, o, RANK, std=0.02), 2.0) for i, o in ((H, W), (H, W), (W, H))
        ]


def kernels(tokens: int = 8192, kind: str = "even") -> None:
    from erniekit.kernels.triton import expert_products as products
    from erniekit.kernels.triton import expert_rows as rows_

    s, R = Sample(tokens, kind), tokens * K
    row_of, place_of, ends = s.order
    gate, up, down = s.updates
    counts = ends.diff(prepend=ends.new_zeros(1))
    print(f"== kernels, {tokens} tokens, {kind} routing ({int(counts.min())}-{int(counts.max())} rows an expert)")
    rows, middle, act, z, z_down = random(R, H), random(R, 2 * W), random(R, W), random(R, 2 * RANK), random(R, RANK)
    flat, GB = s.weights.reshape(-1), 2e-9
    g, u, d = (gate.B.transpose(1, 2), 2.0), (up.B.transpose(1, 2), 2.0), (down.A, 1.0)
    both = [(gate.A, 1.0), (up.A, 1.0)]
    show("take", lambda: rows_.take(s.x, row_of, K, ends, []), 2 * R * H * GB)
    show("take + A of gate and up", lambda: rows_.take(s.x, row_of, K, ends, both), 2 * R * H * GB)
    show("A of gate and up alone", lambda: rows_.take(s.x, row_of, K, ends, both, False), R * H * GB)
    show("take + B of down", lambda: rows_.take(s.x, row_of, K, ends, [(down.B.transpose(1, 2), 2.0)]), 2 * R * H * GB)
    show("index_select", lambda: s.x.index_select(0, row_of // K), 2 * R * H * GB)
    show(
        "activate, no LoRA",
        lambda: rows_.activate(middle, z[:, :0], None, None, None, flat, row_of, ends),
        3 * R * W * GB,
    )
    show("activate", lambda: rows_.activate(middle, z, g, u, d, flat, row_of, ends), 3 * R * W * GB)
    show(
        "activate backward, no LoRA",
        lambda: rows_.activate_backward(act, z[:, :0], middle, z[:, :0], None, None, None, flat, row_of, ends, False),
        5 * R * W * GB,
    )
    show(
        "activate backward",
        lambda: rows_.activate_backward(act, z_down, middle, z, g, u, d, flat, row_of, ends),
        6 * R * W * GB,
    )
    show("sum of choices", lambda: rows_.sum_choices(rows, place_of, K, ends), (R + tokens) * H * GB)
    pair = [(z[:, :RANK], 1.0), (z[:, RANK:], 1.0)]
    show("dA of gate and up, from tokens", lambda: products.outer(s.x, pair, ends, row_of, K), R * H * GB)
    show("dA of gate and up, from rows", lambda: products.outer(rows, pair, ends), R * H * GB)
    show("  the same by grouped_mm", lambda: F.grouped_mm(z.t(), rows, offs=ends), R * H * GB)
    show("dB of gate", lambda: products.outer(middle[:, :W], pair[:1], ends, turned=True), R * W * GB)
    show(
        "dB of gate and up",
        lambda: products.outer_of_halves(middle, z, RANK, (2.0, 2.0), ends),
        2 * R * W * GB,
    )
    show("dB of down", lambda: products.outer(rows, [(z_down, 2.0)], ends, turned=True), R * H * GB)
    show("  the same by grouped_mm", lambda: F.grouped_mm(rows.t(), z_down, offs=ends), R * H * GB)
    show("dA of down", lambda: products.outer(act, [(z_down, 1.0)], ends), R * W * GB)
    both_tails = [(z[:, :RANK], gate.A), (z[:, RANK:], up.A)]
    one_tail = [(z_down, down.B.transpose(1, 2))]
    show("add one low rank to [R, H]", lambda: products.add_low(rows, one_tail, 2.0, ends), 2 * R * H * GB)
    show("add two", lambda: products.add_low(rows, both_tails, 1.0, ends), 2 * R * H * GB)
    big, small = 2.0 * R * H * 2 * W, 2.0 * R * H * W
    gate_up, down_t = s.gate_up.transpose(1, 2), s.down.transpose(1, 2)
    show("gate_up, grouped_mm", lambda: F.grouped_mm(rows, gate_up, offs=ends), flops=big)
    show("down, grouped_mm", lambda: F.grouped_mm(act, down_t, offs=ends), flops=small)
    show("d act, grouped_mm", lambda: F.grouped_mm(rows, s.down, offs=ends), flops=small)
    show("d rows, grouped_mm", lambda: F.grouped_mm(middle, s.gate_up, offs=ends), flops=big)


def before(
    x: torch.Tensor, w: torch.Tensor, order: Order, gate_up: torch.Tensor, down: torch.Tensor, *factors: torch.Tensor
) -> torch.Tensor:
    """The path of other devices, as it is compiled."""

    def linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    gate_a, gate_b, up_a, up_b, down_a, down_b = factors
    rows, ends = gather(x, order, K), order.ends
    low = linear(rows, torch.cat([gate_a, up_a], 1), ends).split(RANK, -1)
    parts = zip(linear(rows, gate_up, ends).chunk(2, -1), low, (gate_b, up_b))
    gated, upped = (torch.add(y, linear(z.contiguous(), B, ends), alpha=2.0) for y, z, B in parts)
    act = F.silu(gated) * upped
    y = torch.add(linear(act, down, ends), linear(linear(act, down_a, ends), down_b, ends), alpha=2.0)
    return combine(y * weights_of_rows(w, order), order, K)


def now(
    x: torch.Tensor, w: torch.Tensor, order: Order, gate_up: torch.Tensor, down: torch.Tensor, *factors: torch.Tensor
) -> torch.Tensor:
    base = Stored(gate_up), Stored(down)
    return expert_mlp(x, order, w, *base, *(Update(a, b, 2.0) for a, b in zip(factors[::2], factors[1::2])))


def blocks(tokens: int = 8192, kinds: tuple[str, ...] = ("even", "zipf")) -> None:
    print(f"== whole block with LoRA, {tokens} tokens: ms forward / forward + backward, GiB over what was there")
    compiled = torch.compile(before, fullgraph=True)
    for kind in kinds:
        for name, call in (("before, compiled", compiled), ("now", now)):
            try:
                print(f"  {kind:5s} {name:22s} {_block(call, Sample(tokens, kind))}", flush=True)
            except Exception as error:
                print(f"  {kind:5s} {name:22s} FAILED {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            gc.collect()
            torch.cuda.empty_cache()


def _block(call: Callable[..., torch.Tensor], s: Sample) -> str:
    factors = [t.requires_grad_() for update in s.updates for t in update[:2]]
    inputs = [s.x.requires_grad_(), s.weights.requires_grad_(), *factors]

    def forward() -> torch.Tensor:
        return call(s.x, s.weights, s.order, s.gate_up, s.down, *factors)

    times = [milliseconds(forward), milliseconds(lambda: _both(forward, inputs, s.dy))]
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    y = forward()
    kept = torch.cuda.memory_allocated() - start
    del y
    _both(forward, inputs, s.dy)
    peak = torch.cuda.max_memory_allocated() - start
    return f"{times[0]:6.3f} / {times[1]:6.3f}   kept {kept / 2**30:.2f}, peak {peak / 2**30:.2f}"


def _both(call: Callable[[], torch.Tensor], inputs: list[torch.Tensor], dy: torch.Tensor) -> None:
    torch.autograd.grad(call(), inputs, dy)


def router(tokens: int = 8192) -> None:
    from erniekit.kernels.router_logits import router_logits

    print(f"== router product, {tokens} tokens")
    x, weight, grad = random(tokens, H), torch.randn(E, H, device="cuda") * 0.02, torch.randn(tokens, E, device="cuda")
    plain = torch.compile(lambda x, w: F.linear(x.float(), w))
    for trained in (False, True):
        inputs = [x.requires_grad_(), *([weight.requires_grad_()] if trained else [])]
        for name, call in (("fp32, compiled", plain), ("three parts", router_logits)):
            show(f"{name}, forward", lambda call=call: call(x.detach(), weight.detach()))
            show(
                f"{name}, both ways, weight {'trained' if trained else 'frozen'}",
                lambda call=call, inputs=inputs: torch.autograd.grad(call(x, weight), inputs, grad),
                graph=False,
            )


PARTS = {"kernels": kernels, "zipf": lambda: kernels(kind="zipf"), "blocks": blocks, "router": router}
PARTS["long"] = lambda: blocks(32768, ("even",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS], help="kernels, blocks and router when not given")
    for part in parser.parse_args().parts or ["kernels", "blocks", "router"]:
        torch.cuda.empty_cache()
        PARTS[part]()


if __name__ == "__main__":
    main()
