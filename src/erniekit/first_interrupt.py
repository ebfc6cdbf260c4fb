"""Ctrl-C in a command's first tenth of a second, while the package is imported: one line and exit code 130, at once.

The first import of the package. It has an effect only where `erniekit` or `python -m erniekit` was started: an import
must not change how another program takes signals. cli/interrupts.py takes over as soon as `main` runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

NAME = "erniekit"


def leave(number: int, frame: object) -> None:
    """Nothing has begun. Not by an exception: imports and their C code wrap it, show it or drop it."""
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(128 + number)


def is_the_command(started: str, words: Sequence[str]) -> bool:
    """started: sys.argv[0], the console script; `-m` while the package of a `python -m` is imported. words: all that
    the process was started with."""
    if started == "-m":
        return NAME in words[words.index("-m") + 1 :][:1] if "-m" in words else False
    return os.path.basename(started) == NAME


def watch() -> None:
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours and is_the_command(sys.argv[0] if sys.argv else "", sys.orig_argv):
        signal.signal(signal.SIGINT, leave)


watch()
