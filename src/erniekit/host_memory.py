"""What of the host's memory a process may take, in bytes. The system keeps files it has read in memory that is free:
it counts as available, since programs get it when they ask. A container's limit counts too: beyond it a process is
killed, however much the host has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# A control group's limit, what it uses, and how `memory.stat` names its files that can be dropped; by version.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(root: Path = Path("/")) -> int | None:
    """What can be taken without swapping; None where the system does not say (it is no Linux)."""
    free = _named(root / "proc/meminfo", "MemAvailable:")
    if free is None:
        return None
    free <<= 10
    for limit, used, stat in _groups(root):
        files = _named(used.with_name("memory.stat"), stat)
        free = min(free, max(0, limit - _number(used) + (files or 0)))
    return free


def total_memory(root: Path = Path("/")) -> int:
    """What the machine has, or a container's limit; 0 where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
    return min([total, *(limit for limit, _, _ in _groups(root))])


def _groups(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Limits this process is under: its group's and those of the groups around it, with the file of what is used. A
    container often sees its own group as the outermost, under a name that is not there."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, names = (controllers, V1) if controllers else ("", V2)  # controllers of one group are mounted as one
        group = PurePosixPath(path.lstrip("/"))
        for part in dict.fromkeys([group, *group.parents]):
            folder = root / "sys/fs/cgroup" / mounted / part
            if limit := _number(folder / names[0]):
                yield limit, folder / names[1], names[2]


def _number(file: Path) -> int:
    """0 where there is none: an absent file, or a limit of `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _named(file: Path, name: str) -> int | None:
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[:1] == [name])
    except (OSError, ValueError, IndexError, StopIteration):
        return None
