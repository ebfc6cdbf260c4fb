"""The smallest Triton kernel: whether a device's Triton compiles and launches one. For probes.py only."""

from __future__ import annotations

import triton
import triton.language as tl


# No annotations but constexpr: Triton compiles them, and takes any other name for a global variable.
@triton.jit  # type: ignore[untyped-decorator]
def add_one(source, target, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    mask = place < size
    tl.store(target + place, tl.load(source + place, mask=mask) + 1, mask=mask)
