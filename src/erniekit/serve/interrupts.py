"""No Ctrl-C is lost, also not one that comes while a prompt is being set up. Used by chat.py."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ANSWERED = b"\0"  # no signal has this number


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """A Ctrl-C that comes while a line's editor is set up is noted and answered only with the next key: CPython waits
    for that key first. A socket tells a thread of every Ctrl-C and of every one handled; it repeats the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def answer(*_: object) -> None:
        with suppress(OSError):
            sender.send(ANSWERED)
        raise KeyboardInterrupt

    def listen() -> None:
        waits = False
        while True:
            receiver.settimeout(0.1 if waits else None)
            try:
                received = receiver.recv(1)
            except TimeoutError:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                received = ANSWERED  # the repeated one comes by the socket again
            if not received:
                return
            waits = received[0] == signal.SIGINT

    handler = signal.signal(signal.SIGINT, answer)
    wake = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGINT, handler)
        sender.close()
        listener.join(1)
        receiver.close()
