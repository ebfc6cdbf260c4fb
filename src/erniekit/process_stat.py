"""Reads /proc/<pid>/stat of Linux. Other systems have no such file: OSError."""

from __future__ import annotations

from pathlib import Path

STATE = 0  # a letter; Z and X have ended
USER_TICKS, SYSTEM_TICKS = 11, 12
START_TICKS = 19  # since the machine started
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def stat_fields(folder: Path) -> list[str]:
    """Of a process's or a thread's folder, from its state on. The program's name before it may hold spaces and
    brackets, so the last bracket is the one that counts."""
    return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def has_ended(fields: list[str]) -> bool:
    return fields[STATE] in "ZX"


def folder_of(pid: int) -> Path:
    return Path("/proc") / str(pid)
