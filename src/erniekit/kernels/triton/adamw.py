"""AdamW, and the squares of gradients, each over many tensors in one launch. Called by kernels/adamw.py.

Tensors are given by address: a row of `tensors` (int64) has where a tensor's fp32 weight, its moments, its 16-bit
weight and its count of updates are, and how long it is; `chunks` (int32 pairs) has which tensor a program works on,
and where in it. Addresses are read on the device, so nothing is compiled or copied again for another set of tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from erniekit.kernels.rounding_noise import SALTS, SPREADS

COLUMNS = tl.constexpr(6)  # of `tensors`: master, average, square, weight, step, length
_SALT, _OTHER = tl.constexpr(SALTS[0]), tl.constexpr(SALTS[1])
_SHIFT_A, _FACTOR_A, _SHIFT_B, _FACTOR_B = (tl.constexpr(n) for spread in SPREADS for n in spread)


@triton.jit
def _lanes(address, first, kind: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the BLOCK elements from `first` on. Known to lie on 16 bytes, they are read 16 bytes at a time."""
    pointers = address.to(tl.pointer_type(kind)) + first + tl.arange(0, BLOCK)
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), BLOCK)
    return pointers


@triton.jit
def _updated(g, p, m, v, lr_decay, step_size, root, rest1, beta2, rest2, eps):
    """In torch's order: the decay, both moments, the move."""
    p -= lr_decay * p
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    return p, m, v


@triton.jit
def _kept(value, salt, MOMENT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """A moment as it is stored: kernels/adamw.stochastic_bf16, or to the nearest."""
    if STOCHASTIC and tl.float32 != MOMENT:
        bits = value.to(tl.uint32, bitcast=True)
        h = bits ^ salt
        h = (h ^ (h >> _SHIFT_A)) * _FACTOR_A
        h = (h ^ (h >> _SHIFT_B)) * _FACTOR_B
        return ((bits + (h >> 16)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(MOMENT)


@triton.jit
def update(
    tensors, grads, chunks, scale, good,
    lr, lr_decay, rest1, log_beta1, beta2, rest2, log_beta2, eps,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """scale: what gradients are multiplied by; good: 0 leaves everything as it is; both on the device. rest: 1 - beta.
    WEIGHT: the type of the 16-bit weights, fp32 where there are none. Counts of updates include this one."""
    if tl.load(good) != 0:
        tensor = tl.load(chunks + 2 * tl.program_id(0))
        start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (BLOCK * BLOCKS)
        row = tensors + tensor * COLUMNS
        grad, master, average, square = tl.load(grads + tensor), tl.load(row), tl.load(row + 1), tl.load(row + 2)
        weight, length = tl.load(row + 3), tl.load(row + 5)
        count = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
        salt = count.to(tl.uint32) * _SALT
        step = count.to(tl.float64)
        factor = tl.load(scale)
        # fp64: 1 - beta ** step loses half its digits in fp32 when the step is small.
        size = tl.div_rn(lr, (1.0 - tl.exp(step * log_beta1)).to(tl.float32))
        root = tl.sqrt_rn((1.0 - tl.exp(step * log_beta2)).to(tl.float32))
        for k in range(BLOCKS):
            first = start + k * BLOCK
            g_at = _lanes(grad, first, GRAD, ALIGNED, BLOCK)
            p_at = _lanes(master, first, tl.float32, ALIGNED, BLOCK)
            m_at = _lanes(average, first, MOMENT, ALIGNED, BLOCK)
            v_at = _lanes(square, first, MOMENT, ALIGNED, BLOCK)
            w_at = _lanes(weight, first, WEIGHT, ALIGNED, BLOCK)
            if first + BLOCK <= length:  # a mask would be known lane by lane only, and so would be the reads
                g, p = tl.load(g_at).to(tl.float32) * factor, tl.load(p_at)
                m, v = tl.load(m_at).to(tl.float32), tl.load(v_at).to(tl.float32)
                p, m, v = _updated(g, p, m, v, lr_decay, size, root, rest1, beta2, rest2, eps)
                tl.store(p_at, p)
                tl.store(m_at, _kept(m, salt, MOMENT, STOCHASTIC))
                tl.store(v_at, _kept(v, salt + _OTHER, MOMENT, STOCHASTIC))
                if tl.float32 != WEIGHT:
                    tl.store(w_at, p.to(WEIGHT))
            elif first < length:
                own = first + tl.arange(0, BLOCK) < length
                g = tl.load(g_at, own, other=0.0).to(tl.float32) * factor
                p = tl.load(p_at, own, other=0.0)
                m = tl.load(m_at, own, other=0.0).to(tl.float32)
                v = tl.load(v_at, own, other=0.0).to(tl.float32)
                p, m, v = _updated(g, p, m, v, lr_decay, size, root, rest1, beta2, rest2, eps)
                tl.store(p_at, p, own)
                tl.store(m_at, _kept(m, salt, MOMENT, STOCHASTIC), own)
                tl.store(v_at, _kept(v, salt + _OTHER, MOMENT, STOCHASTIC), own)
                if tl.float32 != WEIGHT:
                    tl.store(w_at, p.to(WEIGHT), own)


@triton.jit
def squares(
    grads, lengths, chunks, sums, GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """sums[program]: the squares of a chunk's elements, fp32, added in one order whatever runs at the same time."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (BLOCK * BLOCKS)
    grad, length = tl.load(grads + tensor), tl.load(lengths + tensor)
    total = tl.zeros((BLOCK,), tl.float32)
    if start + BLOCK * BLOCKS <= length:
        # Without conditions in between, all loads are issued at once.
        for k in tl.static_range(BLOCKS):
            g = tl.load(_lanes(grad, start + k * BLOCK, GRAD, ALIGNED, BLOCK)).to(tl.float32)
            total += g * g
    else:
        for k in range(BLOCKS):
            first = start + k * BLOCK
            at = _lanes(grad, first, GRAD, ALIGNED, BLOCK)
            g = tl.load(at, first + tl.arange(0, BLOCK) < length, other=0.0).to(tl.float32)
            total += g * g
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def check_update(sums, last, sound, limit, out, COUNT: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """out [3]: what kernels/adamw.py's UpdateCheck has, from the squares' sums. OWN: `last` is not read. One program:
    these are a dozen operations on single numbers, each a launch of its own otherwise."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, COUNT, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums + i, i < COUNT, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    by = norm
    if not OWN:
        before = tl.load(last)
        by = tl.where(tl.abs(before) < float("inf"), before, norm)
    tl.store(out, norm)
    tl.store(out + 1, tl.div_rn(limit, tl.maximum(by, limit)))
    tl.store(out + 2, tl.load(sound) * (tl.abs(norm) < float("inf")).to(tl.float32))
