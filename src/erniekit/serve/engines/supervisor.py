"""Runs one command and ends it, and all it has started, on request or when the process that started it is gone.

Started by external.py as `python supervisor.py GRACE COMMAND ...` with a pipe as its standard input: the pipe closes
however the other side dies, kill -9 included. Imports nothing of erniekit: it starts at once and outlives everything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main(grace: float, command: list[str]) -> int:
    stop_requested = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_requested.set())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stop_requested.set()

    threading.Thread(target=watch, daemon=True).start()
    while child.poll() is None and not stop_requested.wait(0.2):
        pass
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            pass
    code = child.poll()
    # We lead a group of our own: whatever the engine left in it goes now, and we with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    for _ in range(30 if code is not None else 0):
        if not _others():
            break
        time.sleep(0.1)
    if code is None or _others():
        os.killpg(0, signal.SIGKILL)
    return code if code is not None and code >= 0 else 128 - (code or 0)


def _others() -> bool:
    """Whether another process is left in our group."""
    own = os.getpgid(0)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid():
            try:
                if os.getpgid(int(name)) == own and _state(name) != "Z":
                    return True
            except (ProcessLookupError, PermissionError, FileNotFoundError):
                continue
    return False


def _state(pid: str) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
