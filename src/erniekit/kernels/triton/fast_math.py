"""Functions that a card computes in one instruction, where Triton's own guard against numbers too small for it and take
three to eight. Results have 22 right bits or so, numbers below 2 ** -126 count as zero. Used by lean_adamw.py and
expert_rows.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # it has no instructions of a card


@triton.jit
def log2(x):
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def exp2(x):
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def reciprocal(x):
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -1.4426950408889634))
