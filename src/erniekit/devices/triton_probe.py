"""The smallest Triton kernel: whether a device's Triton compiles and launches one. For probes.py alone."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_one(source: Any, target: Any, size: Any, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    mask = place < size
    tl.store(target + place, tl.load(source + place, mask=mask) + 1, mask=mask)
