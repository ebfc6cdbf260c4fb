"""A CPU that claims to record steps, for the code around a recording."""

from __future__ import annotations

from collections.abc import Callable

from erniekit.devices.cpu import CpuDevice


class RecordingCpu(CpuDevice):
    """Recording does the work once, as a card's warm-up does, and replaying does it again."""

    triton, records_graphs = True, True

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def recording_cpu() -> RecordingCpu:
    return RecordingCpu("a recording CPU", "cpu", 1 << 30)
