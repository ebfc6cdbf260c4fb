"""Shared experts on a stream of their own beside the routed ones: the bits of both in turn, each time, launched and
replayed. `python tests/device/test_cuda_overlap.py` prints what it saves at the 21B-A3B shapes, at held clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_timings import RANK, E, H, W, random, routing

from erniekit.kernels import expert_mlp, lora_linear
from erniekit.kernels.expert_mlp import Update
from erniekit.kernels.experts_and_shared import experts_and_shared
from erniekit.kernels.fp8_product import fp8_weight
from erniekit.kernels.lora_linear import RowUpdate
from erniekit.kernels.swiglu import swiglu

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]
TIMES = 20


class Blocks:
    """Routed and shared experts of one layer, all adapted."""

    def __init__(self, tokens: int, base: str) -> None:
        torch.manual_seed(0)
        self.order, weights = routing(tokens, "zipf")
        self.x, self.weights = random(tokens, H).requires_grad_(), weights.requires_grad_()
        self.grads = random(tokens, H), random(tokens, H)
        frozen: list[Any] = [random(E, 2 * W, H, std=0.02), random(E, H, W, std=0.02)]
        frozen += [random(4 * W, H, std=0.02), random(H, 2 * W, std=0.02)]
        self.frozen = [fp8_weight(weight) for weight in frozen] if base == "fp8" else frozen
        self.updates = [
            Update(self._factor(E, RANK, i), self._factor(E, o, RANK), 1.0) for i, o in ((H, W), (H, W), (W, H))
        ]
        spans = ((0, 2 * W),), ((2 * W, 4 * W),)
        self.rows = [RowUpdate(self._factor(RANK, H), self._factor(2 * W, RANK), 1.0, span) for span in spans]
        self.rows_down = [RowUpdate(self._factor(RANK, 2 * W), self._factor(H, RANK), 1.0, ((0, H),))]
        pairs = [*self.updates, *self.rows, *self.rows_down]
        self.leaves = [self.x, self.weights, *(t for pair in pairs for t in pair[:2])]

    @staticmethod
    def _factor(*shape: int) -> torch.Tensor:
        return random(*shape, std=0.02).requires_grad_()

    def at_once(self) -> list[torch.Tensor]:
        routed = expert_mlp.as_given(self.x, self.order, self.weights, *self.frozen[:2], *self.updates)
        shared = lora_linear.as_given(self.frozen[2], self.rows), lora_linear.as_given(self.frozen[3], self.rows_down)
        return self._trained(*experts_and_shared(routed, self.x, *shared))

    def in_turn(self) -> list[torch.Tensor]:
        y = expert_mlp.expert_mlp(self.x, self.order, self.weights, *self.frozen[:2], *self.updates)
        act = swiglu(lora_linear.lora_linear(self.x, self.frozen[2], None, self.rows))
        return self._trained(y, lora_linear.lora_linear(act, self.frozen[3], None, self.rows_down))

    def _trained(self, *answers: torch.Tensor) -> list[torch.Tensor]:
        return [*(y.detach() for y in answers), *torch.autograd.grad(answers, self.leaves, self.grads)]


def differing(got: list[torch.Tensor], want: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(a != b).sum() for a, b in zip(got, want, strict=True)]).sum()


@pytest.mark.parametrize("base", ["bf16", "fp8"])
def test_both_at_once_have_the_bits_of_both_in_turn_launched_and_replayed(base: str) -> None:
    blocks = Blocks(2048, base)
    want = blocks.in_turn()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(TIMES):
        # Nobody waits in between, and memory that is given back is written at once.
        wrong += differing(blocks.at_once(), want)
        random(2048, H)
    assert not wrong
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = blocks.at_once()
    for _ in range(TIMES):
        graph.replay()
        wrong += differing(got, want)
    assert not wrong


def held(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """ms of a replay once the clock has settled."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    for _ in range(2):
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            graph.replay()
            torch.cuda.synchronize()
            count += 1
        each = (time.perf_counter() - began) / count * 1e3
    del kept
    return each


if __name__ == "__main__":
    for base in ("bf16", "fp8"):
        blocks = Blocks(8192, base)
        times = [held(run) for run in (blocks.in_turn, blocks.at_once) * 2]
        print(f"{base}, 8192 tokens: in turn {times[0]:.3f}, {times[2]:.3f} ms; at once {times[1]:.3f}, {times[3]:.3f}")
