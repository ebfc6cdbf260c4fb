"""Every Ctrl-C is heard, also one that comes while a prompt is being set up. Used by chat.py."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ANSWERED = b"\0"  # no signal has this number


@contextmanager
def heard_at_the_prompt() -> Iterator[None]:
    """A Ctrl-C that comes while a line's editor is set up is noted and answered only with the next key: CPython waits
    for that key first. A thread hears by a socket of every Ctrl-C and of every answer, and repeats the unanswered."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def answer(*_: object) -> None:
        with suppress(OSError):
            theirs.send(ANSWERED)
        raise KeyboardInterrupt

    def listen() -> None:
        waits = False
        while True:
            ours.settimeout(0.1 if waits else None)
            try:
                word = ours.recv(1)
            except TimeoutError:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                word = ANSWERED  # the repeated one comes by the socket again
            if not word:
                return
            waits = word[0] == signal.SIGINT

    handler = signal.signal(signal.SIGINT, answer)
    wake = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGINT, handler)
        theirs.close()
        listener.join(1)
        ours.close()
