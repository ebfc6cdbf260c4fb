"""Which rank is slow, and at what: each rank's own work, set side by side every so many steps. Hooked in by recipes/.

Ranks that wait for each other all take the same time a step; only the time without communication shows the slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch

from erniekit.log import warn
from erniekit.train.agreement import HostGroup
from erniekit.train.hooks import Hook, TrainingLoop

if TYPE_CHECKING:
    from erniekit.devices.base import Device
    from erniekit.train.step import StepResult

# The loop's phases and the part of a step each belongs to; evaluating and saving belong to none.
PARTS = {"data": "data", "forward/backward": "compute", "update": "compute", "collective": "communication"}
WARM_STEPS = 3  # compiling differs between ranks
LEAST_S = 0.01  # a step that is not this much slower than the others is noise, whatever the ratio


@dataclass
class Slow:
    """One rank that was slow at one thing."""

    rank: int
    part: str
    times: int  # checks in which it was
    worst: float  # its seconds over the median's
    first_step: int
    last_step: int


class Stragglers(Hook):
    def __init__(
        self,
        world: HostGroup,
        factor: float = 2.0,
        every: int = 50,
        on_slow: Callable[[int, str], None] | None = None,
        probe: Callable[[], float] | None = None,
    ) -> None:
        """factor 0: off. `on_slow(step, text)` on every rank, e.g. an event of the trackers; rank 0 warns in any case.
        `probe()` times a fixed piece of work on this rank's device (see device_probe): where kernels run behind the
        host's back, the host's clock sees only the wait for the slowest."""
        self.world, self.factor, self.every, self.on_slow, self.probe = world, factor, every, on_slow, probe
        self.slow: dict[tuple[int, str], Slow] = {}
        self.checks = 0
        self._steps_seen = self._steps = 0
        self._part, self._since = "", time.perf_counter()
        self._seconds = dict.fromkeys(("data", "compute", "communication"), 0.0)
        self._latest: list[dict[str, float]] = []  # per rank, seconds a step, of the last check

    def phase(self, name: str) -> None:
        """Where the loop is from now on; the watchdog gets the same."""
        now = time.perf_counter()
        if self._part:
            self._seconds[self._part] += now - self._since
        self._part, self._since = PARTS.get(name, ""), now

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self.phase("")
        self._steps_seen += 1
        if self._steps_seen <= WARM_STEPS:
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            return
        self._steps += 1
        if self.factor and self.world.size > 1 and result.step % self.every == 0:
            self.check(result.step)

    def check(self, step: int) -> None:
        """All ranks at the same step: gathers, reports each slow rank once, starts the next interval."""
        mine = {part: seconds / max(1, self._steps) for part, seconds in self._seconds.items()}
        if self.probe:
            mine["device"] = self.probe()
        self._latest = self.world.gather(mine)
        self._seconds, self._steps = dict.fromkeys(self._seconds, 0.0), 0
        self.checks += 1
        for rank, part, seconds, usual in find_slow(self._latest, self.factor):
            ratio = seconds / max(usual, 1e-9)
            self._book(rank, part, ratio, step)
            kind = "a fixed product on its device takes" if part == "device" else "its own work takes"
            text = f"rank {rank} is slow ({part}): {kind} {_ms(seconds)} against {_ms(usual)}, {ratio:.1f}x the median"
            warn(f"step {step}: {text}")
            if self.on_slow:
                self.on_slow(step, text)

    def on_end(self, trainer: TrainingLoop) -> None:
        if not self.checks and self._steps and self.factor and self.world.size > 1:
            self.check(trainer.state.step)  # a run shorter than an interval has its table too

    def _book(self, rank: int, part: str, ratio: float, step: int) -> None:
        entry = self.slow.setdefault((rank, part), Slow(rank, part, 0, 0.0, step, step))
        entry.times, entry.last_step, entry.worst = entry.times + 1, step, max(entry.worst, round(ratio, 2))

    def summary(self) -> dict[str, Any]:
        """For run.json: the spread over ranks at the last check, and every rank that was ever slow."""
        spread = {}
        for part in self._latest[0] if self._latest else ():
            values = [row[part] for row in self._latest]
            spread[part] = {
                "least_ms": round(min(values) * 1e3, 3),
                "median_ms": round(median(values) * 1e3, 3),
                "most_ms": round(max(values) * 1e3, 3),
                "slowest_rank": values.index(max(values)),
            }
        slow = [asdict(entry) for entry in sorted(self.slow.values(), key=lambda entry: (entry.rank, entry.part))]
        return {"checks": self.checks, "factor": self.factor, "parts": spread, "slow": slow}


def find_slow(rows: list[dict[str, float]], factor: float) -> list[tuple[int, str, float, float]]:
    """(rank, the part it loses most at, its seconds, the median's) for every rank slower than factor x median.

    Seconds are of data and compute together: a rank that reads while others compute is not slow. The lower median:
    of two ranks the faster one is the measure.
    """
    found = []
    own = [row["data"] + row["compute"] for row in rows]
    usual = {part: median_low(row[part] for row in rows) for part in rows[0]}
    middle = median_low(own)
    for rank, row in enumerate(rows):
        if own[rank] > factor * middle and own[rank] - middle > LEAST_S:
            loss = {part: row[part] - usual[part] for part in ("data", "compute")}
            found.append((rank, max(loss, key=loss.__getitem__), own[rank], middle))
        elif row.get("device", 0.0) > factor * usual.get("device", 0.0):
            found.append((rank, "device", row["device"], usual["device"]))
    return found


def device_probe(device: Device, size: int = 4096) -> Callable[[], float] | None:
    """Times a matrix product on the card (0.3 ms on an H100); None on a CPU, where the host's clock sees the work."""
    if not device.asynchronous:
        return None
    matrix = torch.ones(size, size, device=device.handle, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)

    def seconds() -> float:
        best = float("inf")
        for _ in range(5):  # the best: others use the card too
            device.synchronise()
            began = time.perf_counter()
            torch.mm(matrix, matrix, out=out)
            device.synchronise()
            best = min(best, time.perf_counter() - began)
        return best

    return seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
