"""Which process is meant: a pid alone may be another process's by now; with its start time and the boot it is not.

Used by jobs.py, which finds its children again after the page was closed or restarted.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

from erniekit.process_stat import BOOT_ID, START_TICKS, folder_of, has_ended, stat_fields


def identity(pid: int) -> str:
    """Boot and start time of a living process as an opaque text; empty when it has ended (a zombie has)."""
    if pid <= 0:
        return ""
    try:
        fields = stat_fields(folder_of(pid))
        boot = BOOT_ID.read_text().strip()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _identity_from_ps(pid)
    return "" if has_ended(fields) else f"{boot}:{fields[START_TICKS]}"


def is_same(pid: int, expected: str) -> bool:
    return bool(expected) and identity(pid) == expected


def send(pid: int, expected: str, number: signal.Signals, group: bool = False) -> bool:
    """Send a signal to that very process, or to its whole session; False when it is no longer there."""
    handle = -1
    try:
        if hasattr(os, "pidfd_open"):  # held from before the check on, it cannot come to mean another process
            handle = os.pidfd_open(pid)
        if not is_same(pid, expected):
            return False
        if group:
            os.killpg(pid, number)
        elif handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(pid, number)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):  # it has ended
            return False
        raise
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def _identity_from_ps(pid: int) -> str:
    """Where there is no /proc."""
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5)
    return done.stdout.strip()
