"""Whether processes are there. A state of others takes a moment, however it was brought about: wait for it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from support.clock import PATIENCE_S, until


def alive(pid: int) -> bool:
    """A zombie is not: it has ended, and only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stopped(pid: int) -> bool:
    """By SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until_gone(*pids: int, seconds: float = PATIENCE_S) -> None:
    """Those that were killed, too: the kernel takes them down when it gets to them."""
    until(lambda: not any(map(alive, pids)), f"{pids} are gone", seconds)


def rank_processes(launcher: int) -> dict[str, psutil.Process]:
    """By the rank's number. What a rank starts (its monitor, its loaders) has its environment, too, and is left out."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess):  # compilers come and go
            number = child.environ().get("RANK")
            if number is not None and child.parent() not in found.values():
                found.setdefault(number, child)
    return found
