"""Clocks and gauges: step times on the device, peak memory of one runner among several, and the rate of a product.

Used by turns.py and worker.py.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch

from erniekit.bench.card import Watch, medians
from erniekit.devices.base import Device, Event

GIB = 1024**3
SETTLE = 1.0  # seconds of work after which a card's clocks are those of a long run
HELD = 1.5  # seconds of products, of which the last half counts

T = TypeVar("T")


class Gauge:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.card = device.asynchronous
        self.settle = SETTLE if self.card else 0.0

    def synchronise(self) -> None:
        self.device.synchronise()

    def sweep(self) -> None:
        """Returns memory that nothing refers to any more to the card."""
        gc.collect()
        self.device.synchronise()
        self.device.empty_cache()

    def held(self) -> int:
        return self.device.allocated()

    def reset_peak(self) -> None:
        self.device.reset_peak()

    def peak(self) -> int:
        return self.device.peak_allocated()

    def _mark(self) -> Event:
        event = self.device.event()
        event.record()
        return event

    def time_steps(self, step: Callable[[int], T], first: int, count: int) -> tuple[list[float], list[T]]:
        """Seconds of each of `count` steps from number `first`. Marks lie in the device's own stream, one between two
        steps, so that time the host keeps the device waiting counts, and nothing waits for the clock."""
        self.synchronise()
        marks, results = [self._mark()], []
        for number in range(first, first + count):
            results.append(step(number))
            marks.append(self._mark())
        self.synchronise()
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)], results


@dataclass(frozen=True)
class ProductRate:
    """FLOP/s of a large matrix product. Power, not kernels, is what makes the second smaller than the first."""

    burst: float  # in the first milliseconds after a pause
    held: float  # from then on
    card: dict[str, float] = field(default_factory=dict)  # its clock, power and temperature meanwhile

    def best(self, other: ProductRate) -> ProductRate:
        longer = max(self, other, key=lambda rate: rate.held)
        return ProductRate(max(self.burst, other.burst), longer.held, longer.card)

    def record(self) -> dict[str, float]:
        return {"burst_tflops": self.burst / 1e12, "held_tflops": self.held / 1e12, **self.card}


def product_rate(device: Device, dtype: torch.dtype, watch: Watch, held_seconds: float | None = None) -> ProductRate:
    """8192 cubed on a card; a CPU makes a few small products, unless held_seconds is given."""
    size, repeats, tries, usual = (8192, 10, 3, HELD) if device.asynchronous else (256, 4, 2, 0.0)
    long = usual if held_seconds is None else held_seconds
    a, b = (torch.randn(size, size, device=device.handle, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    gauge, flops = Gauge(device), 2.0 * size**3

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    products(2)
    burst = 0.0
    for _ in range(tries):
        seconds, _ = gauge.time_steps(lambda _: products(1), 0, repeats)
        burst = max(burst, flops / statistics.median(seconds))

    seconds = []
    at_once = max(4, math.ceil(long / 4 * burst / flops / repeats))
    while not seconds or sum(seconds) < long:
        seconds += gauge.time_steps(lambda _: products(repeats), 0, at_once)[0]
    half = seconds[len(seconds) // 2 :]
    return ProductRate(burst, flops * repeats * len(half) / sum(half), medians(watch.last(sum(half))))
