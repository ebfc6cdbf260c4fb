"""The runner over a boundary where every send waits for its receive: ranks are threads, and none may hang."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.pipeline import Pipeline

WIDTH, PATIENCE = 6, 60.0


class Part(nn.Module):
    """A stage of a small model: ids are embedded in the first, the last has a sum of squares for a loss."""

    mtp_weight = 0.0

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == count - 1
        torch.manual_seed(number)
        self.embed = nn.Embedding(11, WIDTH).double() if self.first else None
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH).double(), nn.LayerNorm(WIDTH).double()
        self.shared = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))  # read twice

    def forward(self, x: torch.Tensor, *_: Any, more: Any = None) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        return x + torch.tanh(self.linear(self.norm(x) * self.shared)) * self.shared


@dataclass
class Micro:
    input_ids: torch.Tensor
    positions: Any = None
    max_doc: int = 0

    def documents(self) -> None:
        return None

    def more(self) -> None:
        return None


def loss(part: Part, batch: Micro, x: torch.Tensor) -> torch.Tensor:
    return part(x).square().sum()


def shape(batch: Micro) -> tuple[tuple[int, ...], torch.dtype]:
    return (*batch.input_ids.shape, WIDTH), torch.float64


class Line:
    """One direction between two ranks. `put` returns when the other end has taken it."""

    def __init__(self) -> None:
        self.things: queue.Queue = queue.Queue()

    def put(self, value: torch.Tensor) -> None:
        taken = threading.Event()
        self.things.put((value, taken))
        assert taken.wait(PATIENCE), "nobody received this"

    def take(self) -> torch.Tensor:
        value, taken = self.things.get(timeout=PATIENCE)
        taken.set()
        return value


@dataclass
class BlockingBoundary:
    lines: dict[tuple[int, int], Line]
    here: int

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self.lines[self.here, rank].put(tensor.clone())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Any:
        value = self.lines[rank, self.here].take()
        assert (tuple(value.shape), value.dtype) == (shape, dtype)
        return SimpleNamespace(wait=lambda: value)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        raise NotImplementedError

    def finish(self) -> None:
        return None


def batches(count: int) -> list[Micro]:
    """Micro-batches of different lengths: shapes are known where they arrive. A generator of its own, as every rank
    thread calls this."""
    own = torch.Generator().manual_seed(5)
    return [Micro(torch.randint(0, 11, (1, 3 + m % 2), generator=own)) for m in range(count)]


def alone(stages: int, m: int, factors: list[float]) -> tuple[float, list[torch.Tensor]]:
    parts = [Part(s, stages) for s in range(stages)]
    total = torch.zeros((), dtype=torch.float64)
    for batch, factor in zip(batches(m), factors):
        x = batch.input_ids
        for part in parts[:-1]:
            x = part(x)
        total = total + loss(parts[-1], batch, x) * factor
    total.backward()
    return float(total.detach()), [p.grad for part in parts for p in part.parameters()]


def together(name: str, ranks: int, each: int, m: int, factors: list[float], splits: bool = True) -> Any:
    stages = ranks * each
    parts = [Part(s, stages) for s in range(stages)]
    lines = {(a, b): Line() for a in range(ranks) for b in range(ranks)}
    totals: dict[int, float] = {}
    layout = Layout(pp=ranks, virtual_stages=each)

    def rank_of(rank: int) -> None:
        mine = [(s, parts[s]) for s in range(rank, stages, ranks)]
        boundary = BlockingBoundary(lines, rank)
        made = Pipeline(mine, World(layout, rank), boundary, torch.device("cpu"), loss, name, splits)
        totals[rank] = float(made.run(batches(m), factors, shape))

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(totals) == ranks, "a rank hangs or failed"
    return sum(totals.values()), [p.grad for part in parts for p in part.parameters()]


@pytest.mark.parametrize(
    ("name", "ranks", "each", "m"),
    [
        ("1f1b", 2, 1, 5), ("1f1b", 4, 1, 6), ("1f1b", 4, 1, 2), ("gpipe", 3, 1, 4), ("interleaved", 2, 2, 4),
        ("interleaved", 4, 2, 8), ("zero_bubble", 2, 1, 4), ("zero_bubble", 4, 1, 6), ("zero_bubble", 2, 2, 4),
        ("interleaved", 1, 3, 2),
    ],
)  # fmt: skip
def test_a_pipeline_whose_sends_all_wait_ends_with_the_gradients_of_one_process(
    name: str, ranks: int, each: int, m: int
) -> None:
    factors = [0.5 + 0.25 * k for k in range(m)]
    want, grads = alone(ranks * each, m, factors)
    got, found = together(name, ranks, each, m, factors)
    assert got == pytest.approx(want, rel=1e-12)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_zero_bubble_with_backward_in_one_gives_the_same() -> None:
    factors = [1.0] * 4
    _, grads = alone(2, 4, factors)
    _, found = together("zero_bubble", 2, 1, 4, factors, splits=False)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
