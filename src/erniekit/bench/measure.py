"""Clocks and gauges: step times on the device, peak memory of one runner among several, and the matmul ceiling.

Used by turns.py and worker.py.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from erniekit.bench.runner import Told

GIB = 1024**3


class Gauge:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.card = device.type == "cuda"

    def synchronise(self) -> None:
        if self.card:
            torch.cuda.synchronize()

    def sweep(self) -> None:
        """What nobody refers to any more goes back to the card."""
        gc.collect()
        if self.card:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def held(self) -> int:
        return torch.cuda.memory_allocated() if self.card else 0

    def reset_peak(self) -> None:
        if self.card:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.card else 0

    def _mark(self) -> Any:
        if not self.card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time_steps(self, step: Callable[[int], Told], first: int, count: int) -> tuple[list[float], list[Told]]:
        """Seconds of each of `count` steps from number `first`. Marks lie in the device's own stream, one between two
        steps, so that time the host keeps the device waiting counts, and nothing waits for the clock."""
        self.synchronise()
        marks, told = [self._mark()], []
        for number in range(first, first + count):
            told.append(step(number))
            marks.append(self._mark())
        self.synchronise()
        return [a.elapsed_time(b) / 1000 if self.card else b - a for a, b in pairwise(marks)], told


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of several large matrix products: 8192 cubed on a card."""
    size, repeats, tries = (8192, 10, 3) if device.type == "cuda" else (256, 4, 2)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    gauge, best = Gauge(device), 0.0
    for _ in range(2):
        a @ b
    for _ in range(tries):
        seconds, _ = gauge.time_steps(lambda _: Told(a @ b), 0, repeats)
        best = max(best, 2.0 * size**3 / statistics.median(seconds))
    return best
