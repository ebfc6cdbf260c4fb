"""The rate of a large product: at first, and of the last half of a longer run of them."""

from __future__ import annotations

import time

import pytest
import torch

from erniekit.bench.card import Watch
from erniekit.bench.measure import ProductRate, product_rate
from erniekit.devices import pick

CPU = pick("cpu")


def test_a_cpu_makes_a_few_products_and_has_no_gauges() -> None:
    rate = product_rate(CPU, torch.float32, Watch(None))
    assert rate.burst > 0
    assert rate.held > 0
    assert rate.record() == {"burst_tflops": rate.burst / 1e12, "held_tflops": rate.held / 1e12}


def test_products_go_on_for_as_long_as_asked() -> None:
    began = time.perf_counter()
    rate = product_rate(CPU, torch.float32, Watch(None), held_seconds=0.3)
    assert time.perf_counter() - began >= 0.3
    assert rate.held < 20 * rate.burst  # a rate, not a sum over the products


def test_of_two_measurements_the_better_counts_with_its_own_gauges() -> None:
    early, late = ProductRate(801e12, 670e12, {"clock_mhz": 1450.0}), ProductRate(790e12, 678e12, {"clock_mhz": 1470.0})
    for best in (early.best(late), late.best(early)):
        assert best == ProductRate(801e12, 678e12, {"clock_mhz": 1470.0})
    assert early.record()["held_tflops"] == pytest.approx(670)
