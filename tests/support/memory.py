"""What memory a process holds and has held. Not by getrusage: its maximum starts at that of the process's parent."""

from __future__ import annotations

import inspect


def memory(word: str = "VmHWM") -> int:
    """Bytes, files mapped into it included: VmRSS now, VmHWM the most since this process began."""
    with open("/proc/self/status") as status:
        return int(status.read().partition(f"{word}:")[2].split()[0]) * 1024


MEMORY = inspect.getsource(memory)  # for programs that a test starts: they do not see this folder
