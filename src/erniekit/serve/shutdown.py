"""Shutdown within a deadline, whatever hangs: a tokenizer, the engine, a client. Used by server.py and external.py.

Python waits for threads when it ends, and asyncio for those of its executor: one that hangs would keep the process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress

from erniekit.serve.worker_process import kill_processes

AGAIN_S = 2.0  # from a second signal to the end
TEARDOWN_S = 30.0  # for the interpreter to end, once everything is stopped
BACKSTOP_S = 2.0  # behind the limit: for an interpreter lock that is never given up


def stopping(work: str, seconds: float) -> str:
    """What a person reads who has asked the server to stop, and waits."""
    return f"stopping: {work}, for {seconds:g} s at most; a second Ctrl-C or SIGTERM ends it now"


class ShutdownDeadline:
    """`within` sets the time; a later call can only shorten it."""

    def __init__(self) -> None:
        self.answers_ended = False  # every answer has ended, if only with the error that the server stops
        self._at = float("inf")
        self._thread: threading.Thread | None = None

    def within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if at >= self._at:
            return
        self._at = at
        with suppress(RuntimeError, ValueError):  # there is no stderr
            # Needs no interpreter lock: ends the process, with code 1, when the thread below cannot run.
            faulthandler.dump_traceback_later(seconds + BACKSTOP_S, exit=True, file=2)
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="ending", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """All is stopped, and Python's own end is left, which is slow on a loaded machine: the backstop, whose code is
        that of a failure, gives it more time."""
        if self.answers_ended:
            with suppress(RuntimeError, ValueError):
                faulthandler.dump_traceback_later(TEARDOWN_S, exit=True, file=2)

    def _wait(self) -> None:
        while (left := self._at - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        self.now()

    def now(self) -> None:
        """0 when no answer was cut off, else 1."""
        suffix = "" if self.answers_ended else ", with answers cut off"
        # Not through sys.stderr: a thread that hangs may hold its lock.
        os.write(2, f"warning: something does not end: the process is ended{suffix}\n".encode())
        kill_processes()
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(0.5)
        os._exit(0 if self.answers_ended else 1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
