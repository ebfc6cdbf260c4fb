"""Ctrl-C while modules are imported, the first seconds of most commands. Used by main.py and launch_rank.py.

An import's C code may drop the KeyboardInterrupt, or leave half a module behind (numpy does both): the command would go
on as if no key had been pressed, or end by an error that reads as a fault of ours. So a Ctrl-C waits for the end of the
import.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType

from erniekit.first_interrupt import leave

LOOK_EVERY = 0.05  # seconds
_IMPORT = "<frozen importlib"  # how the file names of an import's frames begin
_WAITS = b"\nstopping as soon as modules are imported; Ctrl-C again stops at once\n"


def interrupts_wait_for_imports(silent: bool = False) -> None:
    """Not where Ctrl-C is ignored (nohup) or handled already. silent: one of several ranks."""
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, leave):
        signal.signal(signal.SIGINT, _Interrupts(silent))


class _Interrupts:
    def __init__(self, silent: bool) -> None:
        self._silent, self._waits, self._repeated = silent, False, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        repeated, self._repeated = self._repeated, False
        if not _importing(frame):
            self._waits = False
            raise KeyboardInterrupt
        if not repeated:
            if self._waits:
                os._exit(128 + number)
            self._waits = True
            with suppress(OSError):  # whatever reads stderr may have got the signal, too
                os.write(2, b"" if self._silent else _WAITS)
        _thread.start_new_thread(self._repeat, ())

    def _repeat(self) -> None:
        time.sleep(LOOK_EVERY)
        self._repeated = True
        # Whatever handles Ctrl-C by then is called; a real signal also ends a wait in C.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return True
        frame = frame.f_back
    return False
