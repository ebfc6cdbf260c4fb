"""AdamW over many tensors in one launch where states are stored in few bytes. Called by kernels/lean_adamw.py.

As triton/adamw.py, tensors are given by address. A program works on some blocks of neighbours inside rows, so that the
scales of 8-bit moments (kernels/moments8.py) are found while all of a block is at hand: gradient, weight and states are
read once and written once. exact_master.py and position_noise.py have the definitions of the other stored forms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from erniekit.kernels import exact_master, moments8, position_noise
from erniekit.kernels.rounding_noise import SALTS, SPREADS
from erniekit.kernels.triton.adamw import _kept, _updated
from erniekit.kernels.triton.fast_math import log2, reciprocal

# Columns of `tensors`: master, weight, remainder, average, square, three scales, step, numbers of rows, rows, columns,
# first column, salt.
COLUMNS = tl.constexpr(14)
MASTER, EXACT, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of MODE: how the weight is stored
_SALT, _OTHER = tl.constexpr(SALTS[0]), tl.constexpr(SALTS[1])
_SHIFT_A, _FACTOR_A, _SHIFT_B, _FACTOR_B = (tl.constexpr(n) for spread in SPREADS for n in spread)
_SHIFT_C = tl.constexpr(position_noise.LAST_SHIFT)
_ROW, _COLUMN = tl.constexpr(position_noise.ROW), tl.constexpr(position_noise.COLUMN)
_TURN = tl.constexpr(position_noise.TURN)
_NAN = tl.constexpr(exact_master.QUIET_NAN)
_TINY, _HUGE, _SPAN = tl.constexpr(moments8.TINY), tl.constexpr(moments8.HUGE), tl.constexpr(moments8.SPAN)
_LEAST_SPAN = tl.constexpr(moments8.LEAST_SPAN)
_CODES, _HALF = tl.constexpr(moments8.CODES), tl.constexpr(moments8.HALF)
# Integers by additions: conversions are as slow as roots. The bits of _MAGIC + n end with those of n, and the bits of
# _COUNTS with a 16-bit n in their last places are those of _COUNTS + n.
_MAGIC, _COUNTS, _COUNTS_BITS = tl.constexpr(3.0 * 2**22), tl.constexpr(2.0**23), tl.constexpr(0x4B000000)


@triton.jit
def _mix(h):
    h = (h ^ (h >> _SHIFT_A)) * _FACTOR_A
    h = (h ^ (h >> _SHIFT_B)) * _FACTOR_B
    return h ^ (h >> _SHIFT_C)


@triton.jit
def _at(base, offsets, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to blocks [TILE, BLOCK]. Known to lie on 16 bytes, they are read 16 bytes at a time."""
    pointers = base + offsets
    if EVEN:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, BLOCK))
    return pointers


@triton.jit
def _joined(weight, remainder):
    high = weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return (high + remainder.to(tl.int32).to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _bits(p):
    return tl.where(p != p, _NAN, p.to(tl.uint32, bitcast=True))


@triton.jit
def _bf16(bits):
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _exp2_of_little(x):
    """2 ** x of -0.19 <= x <= 0: products are cheaper than the one unit of a card that has exp2."""
    return 1.0 + x * (0.69314718 + x * (0.24022651 + x * (0.05550411 + x * 0.00961813)))


@triton.jit
def _floor_bits(x):
    """Of 0 <= x < 2 ** 22: a number whose bits end with the integer below x, by an addition that rounds. An integer x
    may give x - 1 as well."""
    return (x - 0.5) + _MAGIC


@triton.jit
def _last_byte(x):
    return x.to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def _decoded(code_u, code_v, most, largest, span):
    """moments8.decode of blocks [TILE, BLOCK]."""
    code = code_v.to(tl.int32)
    half_step = span * (0.5 / _CODES)
    # The root of v by one exp2: sqrt(largest) * 2 ** (-half_step * (255 - code)).
    root = tl.sqrt(largest)[:, None] * tl.exp2(code.to(tl.float32) * half_step[:, None] - (half_step * 255.0)[:, None])
    root = tl.where(code > 0, root, 0.0)
    a_step = most * (1.0 / _HALF)
    m = (code_u.to(tl.int32).to(tl.float32) * a_step[:, None] - (a_step * (_HALF + 1.0))[:, None]) * root
    return m, root * root


@triton.jit
def _updated_fast(g, p, m, v, lr_decay, size, root, rest1, beta2, rest2, eps):
    """triton/adamw._updated by quotients that are off in the last bits: 8-bit moments are off by far more."""
    p -= lr_decay * p
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p -= size * m * reciprocal(tl.sqrt(v) * (1.0 / root) + eps)
    return p, m, v


@triton.jit
def _encoded(m, v, chance):
    """moments8.encode of blocks [TILE, BLOCK]: codes of the update and of v, and their three scales [TILE]. Elements
    beyond a row's end have v = 0 and are no others than those without a moment."""
    v = tl.minimum(v, _HUGE)
    present = v >= _TINY
    largest = tl.max(tl.where(present, v, 0.0), 1)
    smallest = tl.min(tl.where(present, v, _HUGE), 1)
    # Of a block without any moment these are infinite or no numbers, and nothing of it is read.
    top = log2(largest)
    span = tl.minimum(tl.maximum(top - log2(smallest), _LEAST_SPAN), _SPAN)
    step = span * (1.0 / _CODES)
    a_code = reciprocal(step)
    # A value between two codes lies at 2 ** -(step * fraction) of the upper one, the lower one at `least`.
    least = tl.exp2(-step)
    share = 65536.0 * reciprocal(1.0 - least)
    ahead = _COUNTS - least * share
    place = (top[:, None] - log2(v)) * a_code[:, None]
    place = tl.maximum(place, 0.0)
    below = _floor_bits(place) - _MAGIC
    rises = _exp2_of_little((below - place) * step[:, None]) * share[:, None] + ahead[:, None]
    high = ((chance >> 16) | _COUNTS_BITS).to(tl.float32, bitcast=True)
    below += tl.where(high >= rises, 1.0, 0.0)
    below = tl.minimum(below, _CODES)
    a_root = tl.rsqrt(largest)
    u = tl.where(present, m * (a_root[:, None] * tl.exp2((0.5 * step)[:, None] * below)), 0.0)
    most = tl.max(tl.abs(u), 1)
    a_step = _HALF * reciprocal(tl.maximum(most, _TINY))
    # _COUNTS / 65536 is the 128 that a code of the update is more than its steps.
    low = ((chance & 0xFFFF) | _COUNTS_BITS).to(tl.float32, bitcast=True)
    code_u = _floor_bits(tl.minimum(u * a_step[:, None] + low * (1.0 / 65536), 255.5))
    code_v = tl.where(present, (255.0 + _MAGIC) - below, _MAGIC)
    return _last_byte(code_u), _last_byte(code_v), most, largest, span


@triton.jit
def update(
    tensors, grads, chunks, scale, good,
    lr, lr_decay, rest1, log_beta1, beta2, rest2, log_beta2, eps,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, WEIGHT: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """MODE: how the weight is stored; WEIGHT: the type of the 16-bit weights, fp32 where the master is the weight.
    EVEN: blocks fill rows and all lies on 16 bytes. The rest as in triton/adamw.py."""
    if tl.load(good) != 0:
        tensor = tl.load(chunks + 2 * tl.program_id(0))
        start = tl.load(chunks + 2 * tl.program_id(0) + 1) * (TILE * TILES)
        row = tensors + tensor * COLUMNS
        grad = tl.load(grads + tensor).to(tl.pointer_type(GRAD))
        master, weight = tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + 1).to(tl.pointer_type(WEIGHT))
        remainder = tl.load(row + 2).to(tl.pointer_type(tl.int16))
        average, square = tl.load(row + 3).to(tl.pointer_type(MOMENT)), tl.load(row + 4).to(tl.pointer_type(MOMENT))
        of_update, of_largest = (
            tl.load(row + 5).to(tl.pointer_type(tl.float32)),
            tl.load(row + 6).to(tl.pointer_type(tl.float32)),
        )
        of_span = tl.load(row + 7).to(tl.pointer_type(tl.float32))
        count = tl.load(tl.load(row + 8).to(tl.pointer_type(tl.float32)))
        numbers = tl.load(row + 9)
        rows, columns = tl.load(row + 10).to(tl.int32), tl.load(row + 11).to(tl.int32)
        first_column, salt = tl.load(row + 12).to(tl.int32), tl.load(row + 13).to(tl.uint32)
        value_salt = count.to(tl.uint32) * _SALT
        turned = count.to(tl.uint32) * _TURN
        step = count.to(tl.float64)
        factor = tl.load(scale)
        size = tl.div_rn(lr, (1.0 - tl.exp(step * log_beta1)).to(tl.float32))
        root = tl.sqrt_rn((1.0 - tl.exp(step * log_beta2)).to(tl.float32))
        a_row = (columns + BLOCK - 1) // BLOCK
        for k in range(TILES):
            j = start + k * TILE + tl.arange(0, TILE)
            valid = j < rows * a_row
            r, b = j // a_row, j % a_row
            lane = tl.arange(0, BLOCK)[None, :]
            begin = r.to(tl.int64) * columns + b * BLOCK
            column = (b * BLOCK)[:, None] + lane
            if EVEN:
                own = tl.broadcast_to(valid[:, None], (TILE, BLOCK))
            else:
                own = valid[:, None] & (column < columns)
            at = begin[:, None] + lane
            g_at, p_at, w_at = (
                _at(grad, at, EVEN, BLOCK),
                _at(master, at, EVEN, BLOCK),
                _at(weight, at, EVEN, BLOCK),
            )
            r_at, m_at = _at(remainder, at, EVEN, BLOCK), _at(average, at, EVEN, BLOCK)
            v_at = _at(square, at, EVEN, BLOCK)
            if numbers != 0:
                number = tl.load(numbers.to(tl.pointer_type(tl.int32)) + r, valid, other=0).to(tl.uint32)
            else:
                number = r.to(tl.uint32)
            h = _mix(_mix(number * _ROW + salt)[:, None] ^ ((column + first_column).to(tl.uint32) * _COLUMN))

            g = tl.load(g_at, own, other=0.0).to(tl.float32) * factor
            if MODE == MASTER:
                p = tl.load(p_at, own, other=0.0)
            elif MODE == EXACT:
                p = _joined(tl.load(w_at, own, other=0.0), tl.load(r_at, own, other=0))
            else:
                p = tl.load(w_at, own, other=0.0).to(tl.float32)
            m, v = tl.load(m_at, own, other=0), tl.load(v_at, own, other=0)
            if tl.uint8 == MOMENT:
                most = tl.load(of_update + j, valid, other=0.0)
                largest = tl.load(of_largest + j, valid, other=0.0)
                m, v = _decoded(m, v, most, largest, tl.load(of_span + j, valid, other=0.0))
                p, m, v = _updated_fast(g, p, m, v, lr_decay, size, root, rest1, beta2, rest2, eps)
                code_u, code_v, most, largest, span = _encoded(m, v, _mix(h + _OTHER) + turned)
                tl.store(m_at, code_u, own)
                tl.store(v_at, code_v, own)
                tl.store(of_update + j, most, valid)
                tl.store(of_largest + j, largest, valid)
                tl.store(of_span + j, span, valid)
            else:
                m, v = m.to(tl.float32), v.to(tl.float32)
                p, m, v = _updated(g, p, m, v, lr_decay, size, root, rest1, beta2, rest2, eps)
                tl.store(m_at, _kept(m, value_salt, MOMENT, STOCHASTIC), own)
                tl.store(v_at, _kept(v, value_salt + _OTHER, MOMENT, STOCHASTIC), own)
            if MODE == MASTER:
                tl.store(p_at, p, own)
                if tl.float32 != WEIGHT:
                    tl.store(w_at, p.to(WEIGHT), own)
            elif MODE == EXACT:
                bits = _bits(p)
                tl.store(w_at, _bf16(bits + 0x8000), own)
                tl.store(r_at, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), own)
            else:
                bits = tl.where(p != p, _NAN, p.to(tl.uint32, bitcast=True) + ((h + turned) >> 16))
                tl.store(w_at, _bf16(bits), own)
