"""SwiGLU on a fused projection, one sweep each way. Called by kernels/swiglu.py. T rows, W width of one half."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def forward(gate_up, out, width, BLOCK: tl.constexpr):
    """gate_up [T, 2 W] -> out [T, W], both contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(grad, gate_up, out, width, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """grad [T, W], gate_up [T, 2 W] -> out [T, 2 W]: both halves of one buffer, which a concatenation writes twice.
    PAIRED: each gate lies next to its up in gate_up; out has gates first all the same."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if PAIRED:
        place = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_up + row * 2 * width + place, mask=place < 2 * width, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    bent = tl.sigmoid(gate)
    silu = gate * bent
    kind = out.dtype.element_ty
    tl.store(out + at, (g * up * (bent + silu * (1.0 - bent))).to(kind), mask=inside)
    tl.store(out + at + width, (g * silu).to(kind), mask=inside)


def grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, BLOCK)
