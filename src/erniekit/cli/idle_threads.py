"""How OpenMP's threads of a command wait for work. Called by main.py, before torch is imported, which reads it."""

from __future__ import annotations

import os

# What says how OpenMP's threads wait, of GNU's library and of Intel's.
WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def let_threads_sleep() -> None:
    """Before torch is imported, which reads it: OpenMP's threads sleep while they have nothing to do, unless the
    environment says otherwise. Usually they spin; beside another process each then takes the processor that the thread
    it waits for needs, and two runs on two cores were 40 times slower."""
    if not any(name in os.environ for name in WAITS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
