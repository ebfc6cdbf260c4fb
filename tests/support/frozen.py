"""Modules that were imported are kept out of garbage collections: every run ends with one, which would walk through all
of them each time."""

from __future__ import annotations

import gc
import sys

ENOUGH = 100  # modules that were imported since

_known = 0


def freeze_imports() -> None:
    """Does nothing until many more modules were imported than at its last call."""
    global _known
    if len(sys.modules) > _known + ENOUGH:
        gc.collect()
        gc.freeze()
        _known = len(sys.modules)
