"""Whether Triton kernels can be built here. Asked by every file that has one, and by recipes/pace.py."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec


@cache
def why_no_triton() -> str | None:
    """In a user's words; None: it is all there."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "no C compiler, with which Triton builds what starts its kernels; apt install gcc"
    return None


@cache
def has_triton() -> bool:
    return why_no_triton() is None
