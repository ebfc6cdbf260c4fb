"""What the system knows of a process: when it began, what it computed, and whether it waits for its turn.

media/worker.py tells a decoder that hangs from one that a busy machine keeps waiting; vision/job.py tells what this run
has found out from what an earlier one did. Without /proc (not Linux) wall time stands for all of it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from erniekit.process_stat import START_TICKS, STATE, SYSTEM_TICKS, USER_TICKS, folder_of, stat_fields

_IMPORTED = time.time()
_KEPT_WAITING = "RD"  # for a processor, for a disk


@dataclass(frozen=True)
class ProcessTimes:
    computed: float  # seconds on a processor
    began: float  # seconds since the machine started
    kept_waiting: bool  # some thread has work to do: what it lacks is the machine's to give


def times_of(pid: int) -> ProcessTimes | None:
    """None: not known here, or the process has ended."""
    try:
        fields = stat_fields(folder_of(pid))
        states = [stat_fields(task)[STATE] for task in (folder_of(pid) / "task").iterdir()]
        second = os.sysconf("SC_CLK_TCK")
        used, began = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]), int(fields[START_TICKS])
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return ProcessTimes(used / second, began / second, any(state in _KEPT_WAITING for state in states))


def started() -> float:
    """When this process began, in seconds as `time.time()` counts."""
    own = times_of(os.getpid())
    if own is None:
        return _IMPORTED
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + own.began


class Idle:
    """Seconds that a process had for itself without a sign of life: what it computed, and, while it waits for nothing
    that a busy machine withholds, the time that passed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._times: ProcessTimes | None = None  # at the last look
        self.again()

    def again(self) -> None:
        """There was a heartbeat. Cheap: the system is queried only where no other follows."""
        self.seconds, self._at = 0.0, time.monotonic()
        self._since, self._times = self._at, None

    @property
    def passed(self) -> float:
        """By the clock, whichever process ran."""
        return self._at - self._since

    def look(self) -> None:
        now, times = time.monotonic(), times_of(self._pid)
        own = now - self._at
        if times is not None and times.kept_waiting:
            own = min(own, times.computed - self._times.computed) if self._times is not None else 0.0
        self.seconds += own
        self._at, self._times = now, times
