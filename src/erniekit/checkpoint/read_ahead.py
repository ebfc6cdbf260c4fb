"""Weight files are brought into the system's memory while a run still reads its data: both are waiting for a disk, and
one after the other they took twice as long. Called by recipes/training.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from erniekit.host_memory import available_memory

STRIDE = 128 << 10  # bytes a call: Linux may shorten longer ones to this
SHARE = 0.5  # of the memory that is available: more would push out what was read first


@contextmanager
def reading_ahead(files: Iterable[Path]) -> Iterator[None]:
    """For as long as the block lasts, or until all are there. What is in memory already costs nothing, and what cannot
    be read is left to who needs it."""
    over = threading.Event()
    if not hasattr(os, "posix_fadvise"):
        yield
        return
    room = SHARE * (available_memory() or 0)
    thread = threading.Thread(target=_read, args=(sorted(files), room, over), name="erniekit-read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read(files: Iterable[Path], room: float, over: threading.Event) -> None:
    for file in files:
        try:
            fd = os.open(file, os.O_RDONLY)
        except OSError:
            continue
        try:
            for offset in range(0, os.fstat(fd).st_size, STRIDE):
                if over.is_set() or room < STRIDE:
                    return
                os.posix_fadvise(fd, offset, STRIDE, os.POSIX_FADV_WILLNEED)
                room -= STRIDE
        except OSError:
            return
        finally:
            os.close(fd)
