"""Curves for the report: thinned without losing the spike one is looking for."""

from __future__ import annotations

import json
import math
import random

from erniekit.track.curves import Curve, read_curves, smooth, thin


def curve(values):
    made = Curve()
    for step, value in enumerate(values, start=1):
        made.add(step, value)
    return made


def test_thinning_keeps_the_ends_and_every_extreme_in_step_order():
    random.seed(0)
    noisy = [math.sin(step / 900) + random.random() for step in range(100_000)]
    noisy[777], noisy[55_555] = 50.0, -50.0
    whole = curve(noisy)
    small = thin(whole, limit=2000)
    assert len(small) <= 2000
    assert list(small.steps) == sorted(set(small.steps))
    assert (small.steps[0], small.steps[-1]) == (1, 100_000)
    assert (small.values[0], small.values[-1]) == (noisy[0], noisy[-1])
    kept = dict(zip(small.steps, small.values))
    assert kept[778] == 50.0
    assert kept[55_556] == -50.0
    assert all(value == noisy[step - 1] for step, value in kept.items())


def test_short_curves_are_left_alone():
    short = curve([3.0, 2.0, 1.0])
    assert thin(short, limit=3) is short


def test_the_running_mean_of_a_constant_is_that_constant():
    assert all(math.isclose(value, 2.5) for value in smooth(curve([2.5] * 300)).values)


def test_every_metric_is_read_and_values_that_are_not_finite_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [
        {"global_step": 1, "loss": 2.0},
        {"global_step": 2, "loss": None},
        {"global_step": 2, "eval_loss": 1.0},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "{torn")
    curves = read_curves(path)
    assert set(curves) == {"loss", "eval_loss"}
    assert list(curves["loss"].steps) == [1]
    assert curves["loss"].not_finite == 1
    assert list(curves["eval_loss"].values) == [1.0]
