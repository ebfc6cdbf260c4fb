"""Progress inside long work: loops over files, rows and tensors call `beat`, and the process's watchdog listens.

Called from every package; the watchdog (train/watchdog.py) and a held cache lock (data/token_cache.py) listen. Without
a listener a beat is a counter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

Item = TypeVar("Item")

_listeners: list[tuple[int, Callable[[], None]]] = []
_beats: dict[int, int] = {}  # thread -> how often it has called


def beat() -> None:
    """This thread got one piece further. Only listeners that this thread added are called: a save in the background
    must not pass for progress of the training loop."""
    me = threading.get_ident()
    _beats[me] = _beats.get(me, 0) + 1
    for thread, listener in tuple(_listeners):
        if thread == me:
            listener()


def each(items: Iterable[Item]) -> Iterator[Item]:
    """The items, with a beat after each."""
    for item in items:
        yield item
        beat()


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """While the block runs, `listener()` is called at every beat of this thread."""
    entry = (threading.get_ident(), listener)
    _listeners.append(entry)
    try:
        yield
    finally:
        _listeners.remove(entry)


def awaited(work: Future[Item], threads: Collection[int], every: float = 0.2) -> Item:
    """The result of work that one of these threads does; their progress is that of the thread that waits."""
    done, seen = threading.Event(), _count(threads)
    work.add_done_callback(lambda _: done.set())
    while not done.wait(every):
        now = _count(threads)
        if now != seen:
            seen = now
            beat()
    return work.result()


def _count(threads: Collection[int]) -> int:
    return sum(_beats.get(thread, 0) for thread in tuple(threads))


def join(thread: threading.Thread, every: float = 0.2) -> None:
    """Waits for a thread; its progress is that of the thread that waits."""
    last = None
    while thread.is_alive():
        thread.join(every)
        count = _beats.get(thread.ident or 0)
        if count != last:
            last = count
            beat()
    thread.join()
