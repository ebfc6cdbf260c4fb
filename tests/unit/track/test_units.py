"""Numbers as people read them."""

from __future__ import annotations

import pytest

from erniekit.track.units import duration, metric_text, short


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (400, "400"), (5000, "5000"), (12_340, "12.34k"), (4.1e6, "4.1M"), (2e9, "2G"), (1e-5, "1e-5")],
)
def test_short_numbers(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "00:05"), (65, "01:05"), (3723, "1:02:03"), (90_000, "1d 01:00"), (-1, "00:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 8.67642784, "8.676428"),
        ("eval_loss", 2.0, "2.000000"),
        ("learning_rate", 0.00033333, "0.0003333"),
        ("max_memory_allocated", 1.234, "1.23 GiB"),
        ("train_runtime", 3723.2, "3723 s"),
        ("mfu", 0.413, "41.3%"),
        ("loss", float("inf"), "inf"),
    ],
)
def test_metrics_carry_their_units(name, value, text):
    assert metric_text(name, value) == text
