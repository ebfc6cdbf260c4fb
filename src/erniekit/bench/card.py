"""The card's own gauges while it works: clock, power and temperature, as `nvidia-smi` reads them. Nothing is ever set.

Used by worker.py, turns.py and measure.py. Where the tool is absent or its output is not understood there are no
readings.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

QUERY = (
    "nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits", "-lms", "100",
    "-i",
)  # fmt: skip
FIELDS = ("clock_mhz", "power_w", "temperature_c")  # of a line, in its order
SHORTEST = 0.25  # seconds: in less there may be no reading at all
LONGEST = 200  # characters of a line


@dataclass(frozen=True)
class Reading:
    moment: float  # of time.monotonic()
    values: tuple[float | None, ...]  # as FIELDS; None where this card does not report it


class Watch:
    """Reads one card from `with` to its end; nothing at all when there is none."""

    def __init__(self, card: str | None) -> None:
        """card: as nvidia-smi's -i takes it."""
        self._card = card
        self._readings: list[Reading] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._card is None:
            return self
        try:
            self._process = subprocess.Popen(
                [*QUERY, self._card],
                stdin=subprocess.DEVNULL,  # a worker's own holds its orders
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError:
            return self
        assert self._process.stdout is not None
        self._thread = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._thread is None:
            return
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(2)

    def _read(self, lines: IO[str]) -> None:
        with lines:
            while line := lines.readline(LONGEST):
                if values := parse(line):
                    self._readings.append(Reading(time.monotonic(), values))

    def last(self, seconds: float) -> list[Reading]:
        """Those of the last so many seconds."""
        since = time.monotonic() - max(seconds, SHORTEST)
        return [reading for reading in self._readings if reading.moment >= since]


def parse(line: str) -> tuple[float | None, ...]:
    """Empty when it is not a line of readings; a field may be `[N/A]`."""
    fields = line.split(",")
    values = tuple(_number(field) for field in fields)
    return values if len(fields) == len(FIELDS) and any(v is not None for v in values) else ()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def medians(readings: Iterable[Reading]) -> dict[str, float]:
    """By field; without those that have no reading."""
    columns = zip(FIELDS, zip(*(reading.values for reading in readings)))
    with_values = ((name, [v for v in column if v is not None]) for name, column in columns)
    return {name: statistics.median(values) for name, values in with_values if values}
