"""metrics.jsonl as curves small enough to draw: thinned without losing a spike, smoothed. For report.py."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

from erniekit.track import jsonl

MAX_POINTS = 2000  # more than the pixels of any chart here


@dataclass
class Curve:
    """Finite points in step order; `not_finite` counts the logged values that were NaN or infinite."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))
    not_finite: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


def read_curves(path: Path) -> dict[str, Curve]:
    """Every numeric metric of a metrics file, in the order first met."""
    curves: dict[str, Curve] = {}
    for record in jsonl.read(path):
        step = record["global_step"]
        for name, value in record.items():
            if name == "global_step" or isinstance(value, str | list | dict):
                continue
            curve = curves.setdefault(name, Curve())
            if value is None:
                curve.not_finite += 1
            else:
                curve.add(step, float(value))
    return curves


def thin(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """At most `limit` points: first, last, and the lowest and highest of each stretch between, in order."""
    count = len(curve)
    if count <= limit:
        return curve
    stretches = (limit - 2) // 2
    inner = count - 2
    small = Curve(not_finite=curve.not_finite)
    small.add(curve.steps[0], curve.values[0])
    for stretch in range(stretches):
        begin = 1 + stretch * inner // stretches
        end = 1 + (stretch + 1) * inner // stretches
        lowest = min(range(begin, end), key=curve.values.__getitem__)
        highest = max(range(begin, end), key=curve.values.__getitem__)
        for index in sorted({lowest, highest}):
            small.add(curve.steps[index], curve.values[index])
    small.add(curve.steps[-1], curve.values[-1])
    return small


def smooth(curve: Curve) -> Curve:
    """A running mean over about a fiftieth of the run, unbiased at the start."""
    keep = 1 - 2 / (max(5, len(curve) / 50) + 1)
    total = weight = 0.0
    result = Curve()
    for step, value in zip(curve.steps, curve.values):
        total = keep * total + value
        weight = keep * weight + 1
        result.add(step, total / weight)
    return result
