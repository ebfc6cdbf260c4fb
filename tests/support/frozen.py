"""Objects that stay are kept out of garbage collections: every run ends with one, which would walk through all of them
each time. Modules that were imported, syntax trees that the tests of the architecture keep."""

from __future__ import annotations

import gc

ENOUGH = 50_000  # objects that came since: a collection walks through them in some 30 ms


def freeze_what_stays() -> None:
    """Does nothing until there are many more objects than at its last call."""
    if len(gc.get_objects()) > ENOUGH:
        gc.collect()
        gc.freeze()
