"""On one NVIDIA card: the benchmark's gauges, the two rates of a product, and a profile of kernels alone."""

from __future__ import annotations

import shutil
import time

import pytest
import torch

from erniekit.bench.card import Watch, medians
from erniekit.bench.measure import SETTLE, Gauge, product_rate
from erniekit.bench.profile import by_name, profile_steps, spans_of
from erniekit.devices import pick

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

CARD = torch.device("cuda")
needs_smi = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")


@needs_smi
def test_this_very_card_is_read_ten_times_a_second() -> None:
    torch.zeros(1, device=CARD)
    with Watch(pick("gpu").smi_id()) as watch:
        until = time.monotonic() + 20
        while not watch.last(60) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(2.0)
        readings = watch.last(2.0)
    assert 10 <= len(readings) <= 30  # as they are taken, not in one lump at the end
    told = medians(readings)
    assert 100 < told["clock_mhz"] < 4000
    assert 10 < told["power_w"] < 2000
    assert 10 < told["temperature_c"] < 110


def test_a_product_is_no_faster_in_a_long_run_than_at_first() -> None:
    began = time.perf_counter()
    with Watch(pick("gpu").smi_id()) as watch:
        rate = product_rate(pick("gpu"), torch.bfloat16, watch)
    assert time.perf_counter() - began >= 1.5
    assert 0.5 * rate.burst < rate.held < 1.05 * rate.burst
    if shutil.which("nvidia-smi"):
        assert rate.record().keys() >= {"clock_mhz", "power_w", "temperature_c"}


def test_steps_on_a_card_are_warm_after_a_second() -> None:
    assert Gauge(pick("gpu")).settle == SETTLE == 1.0


def test_a_profile_counts_the_recorded_steps_kernels_and_no_others() -> None:
    a = torch.randn(1024, 1024, device=CARD)

    def step(number: int) -> None:
        for _ in range(3):
            a @ a
        if number < 12:
            torch.sort(a)

    told = profile_steps(step, first=10, before=2, count=2, device=pick("gpu"))
    assert "sort and index" not in told["kinds_ms"]
    gemm = [k for k in told["longest"] if k["kind"] == "gemm"]
    assert sum(k["calls"] for k in gemm) in (3, 6)  # a product may be two kernels
    least = 3 * 2 * 1024**3 / 2e15 * 1000
    assert told["kinds_ms"]["gemm"] > least


def test_kernels_are_those_of_key_averages() -> None:
    from torch.profiler import ProfilerActivity, profile

    a = torch.randn(512, 512, device=CARD)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(5):
            (a @ a).relu().sum()
        torch.cuda.synchronize()
    ours = by_name(spans_of(recorded, pick("gpu")))
    theirs = {
        event.key: (event.self_device_time_total / 1000, event.count)
        for event in recorded.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }
    assert len(ours) >= 3
    for name, (ms, calls) in ours.items():
        assert theirs[name][1] == calls
        assert theirs[name][0] == pytest.approx(ms, rel=1e-3)


def test_a_step_of_fifty_thousand_kernels_is_profiled_in_seconds() -> None:
    a = torch.randn(64, device=CARD)

    def step(_: int) -> None:
        for _ in range(50_000):
            a.add_(0.0)

    began = time.perf_counter()
    told = profile_steps(step, first=0, before=1, count=1, device=pick("gpu"))
    seconds = time.perf_counter() - began
    assert sum(k["calls"] for k in told["longest"]) >= 50_000
    assert seconds < 20  # 10 s of it at most are the first use of the profiler
