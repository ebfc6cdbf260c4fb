"""What shortens imports at a command's start: torch and its compiler are thousands of files, and where opening one
takes long (containers, network disks) they are most of the time to the first step. Used by recipes/run.py,
recipes/plan_command.py and kernels/available.py; imports no torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from threading import Thread, main_thread

# Needed by libraries of kernels and by torch's compiler, and none of them imports torch.
OF_KERNELS = ("cutlass",)
OF_COMPILER = ("sympy", "networkx")
JAX = "jax"  # a second of imports: cutlass looks whether it is there, and nothing here calls it


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports, which leave no garbage: every collection walks through all that was imported before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def without_jax() -> Iterator[None]:
    """An import of jax inside fails, as if it were not installed; where it is imported already nothing changes."""
    if JAX in sys.modules:
        yield
        return
    sys.modules[JAX] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(JAX) is None:
            sys.modules.pop(JAX, None)


def import_beside_torch(compiles: bool) -> Thread:
    """In a thread while this one imports torch: one waits for files while the other computes. What fails here fails
    again where it is needed, with its reason. compiles: torch's compiler will be needed."""

    def work() -> None:
        for name in (*OF_COMPILER, *OF_KERNELS) if compiles else OF_KERNELS:
            if not main_thread().is_alive():
                return  # the command has ended already
            with suppress(Exception), without_jax():
                if find_spec(name) is not None:
                    import_module(name)

    thread = Thread(target=work, name="erniekit-imports")
    thread.start()
    return thread
