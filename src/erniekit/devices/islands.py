"""The values of the key `islands`: which unlike devices share one job, in order. No torch: config and ranks read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from erniekit.devices import DEVICES, INSTALLED
from erniekit.errors import ConfigError
from erniekit.registry import nearest

FIX = "DEVICE:RANKS, DEVICE:RANKS:SPEED or DEVICE:RANKS:SPEED:MEMORY, such as gpu:8:3:79G"
GIB = 1024**3


@dataclass(frozen=True)
class DeviceIsland:
    device: str  # its name in DEVICES
    ranks: int
    speed: float | None = None  # of one device, relative to the other islands'; None: measured
    memory: float | None = None  # bytes of one device; None: what it reports


def parse_islands(values: Sequence[str], where: str = "islands") -> tuple[DeviceIsland, ...]:
    return tuple(_island(value.strip(" []'\""), where) for value in values if value.strip(" []'\""))


def _island(value: str, where: str) -> DeviceIsland:
    found = re.fullmatch(r"(\w+):(\d+)(?::(\d+(?:\.\d+)?))?(?::(\d+(?:\.\d+)?)G)?", value)
    if found is None or not int(found[2]) or (found[3] and not float(found[3])) or (found[4] and not float(found[4])):
        raise ConfigError(f"{value!r} is not an island", where=where, fix=FIX)
    device, ranks, speed, memory = found.groups()
    if device not in DEVICES and device not in INSTALLED:
        near = nearest(device, list(DEVICES))
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(DEVICES)}"
        raise ConfigError(f"no device {device!r}", where=where, fix=fix)
    return DeviceIsland(
        device, int(ranks), float(speed) if speed else None, float(memory) * GIB if memory else None
    )  # fmt: skip


def island_of_rank(islands: Sequence[DeviceIsland], rank: int) -> DeviceIsland | None:
    """None: there are fewer ranks in them."""
    for island in islands:
        if rank < island.ranks:
            return island
        rank -= island.ranks
    return None
