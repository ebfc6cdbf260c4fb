"""4-bit weights unpacked into scratch memory, in their own order or turned, for NVIDIA cards. kernels/stored/int4.py,
int4_group.py, mxfp4.py and nf4.py define the same in torch.

A program has a tile of one matrix: bytes in, numbers out. Both orders read and write whole lines. A group of columns
with one scale divides the tile. On an H200 a kernel of this form unpacked 64 experts of 3072 x 2560 to fp8 in 0.19 ms,
turned in 0.25 ms, and the product after it took 0.82 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from erniekit.kernels import nf4
from erniekit.kernels.triton.expert_tiles import Tile

# Of 512 columns: lines of 256 bytes in, 512 out.
UNPACK = Tile(32, 512, 8, 1)
UNPACK_TURNED = Tile(64, 256, 8, 1)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Four integers of 4 bits at a time to fp8, by the instruction that permutes bytes: 16 bits of codes are four places in
# a table of eight bytes, where a place with its highest bit set gives zero, as no byte of the tables is negative.
# 0x44403800 and 0x4e4c4a48 are 0 to 7 in e4m3; 0x4a4c4e50 and 0x38404448 are 8 down to 1, for the codes 8 to 15 with
# that bit inverted. Only the latter pass 0x80 when 0x48 is added: that is their sign.
_FOUR_TO_FP8 = tl.constexpr(
    """
    {
    .reg .b32 over, high, high_over, first, second;
    xor.b32 over, $2, 0x88888888;
    shr.b32 high, $2, 16;
    shr.b32 high_over, over, 16;
    prmt.b32 first, 0x44403800, 0x4e4c4a48, $2;
    prmt.b32 second, 0x4a4c4e50, 0x38404448, over;
    or.b32 first, first, second;
    add.u32 second, second, 0x48484848;
    lop3.b32 $0, first, second, 0x80808080, 0xf8;
    prmt.b32 first, 0x44403800, 0x4e4c4a48, high;
    prmt.b32 second, 0x4a4c4e50, 0x38404448, high_over;
    or.b32 first, first, second;
    add.u32 second, second, 0x48484848;
    lop3.b32 $1, first, second, 0x80808080, 0xf8;
    }
    """
)


@triton.jit
def _int4_as_fp8(packed, BR: tl.constexpr, BC: tl.constexpr):
    """Bytes of fp8 [BR, BC] of bytes of codes [BR, BC / 2]: of four of those, the first four numbers and the rest."""
    first, rest = tl.inline_asm_elementwise(_FOUR_TO_FP8, "=r,=r,r", [packed], (tl.uint8, tl.uint8), True, 4)
    both = tl.join(tl.reshape(first, (BR, BC // 8, 4)), tl.reshape(rest, (BR, BC // 8, 4)))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (BR, BC)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _numbers(code, table, FORMAT: tl.constexpr):
    """fp32, of codes below 16."""
    if FORMAT == "int4":
        number = ((code.to(tl.int32) ^ 8) - 8).to(tl.float32)
    elif FORMAT == "e2m1":
        size = code.to(tl.int32) & 7
        # By its bits: an exponent of 2 and a mantissa of 1; below 1 there are 0.5 and 0.
        bits = (((size >> 1) + 126) << 23) | ((size & 1) << 22)
        number = tl.where(size < 2, size.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
        number = tl.where(code >= 8, -number, number)
    else:
        number = tl.load(table + code)
    return number


@triton.jit
def _unpack(
    codes, scales, most, table, out, rows, width, GROUP: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    POWERS: tl.constexpr, OVER_MOST: tl.constexpr, TOP: tl.constexpr, TURNED: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """GROUP columns have a scale, 0: a whole row. POWERS: scales are e8m0 bytes; OVER_MOST: over their row's `most`."""
    matrix = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * BR
    left = tl.program_id(0) * BC
    r = first + tl.arange(0, BR)
    b = left // 2 + tl.arange(0, BC // 2)
    c = left + tl.arange(0, BC)
    row = matrix * rows + r
    half = width // 2
    mask = (r < rows)[:, None] & (b < half)[None, :]
    packed = tl.load(codes + row[:, None] * half + b[None, :], mask=mask, other=0)
    if FORMAT == "int4" and not SCALED and out.dtype.element_ty == tl.float8e4nv and not _INTERPRETED:
        result = _int4_as_fp8(packed, BR, BC)
    else:
        if FORMAT == "nf4":
            code = tl.interleave(packed >> 4, packed & 15)
        else:
            code = tl.interleave(packed & 15, packed >> 4)
        number = _numbers(code, table, FORMAT)
        if SCALED:
            if GROUP > 0:
                groups = width // GROUP
                g = left // GROUP + tl.arange(0, BC // GROUP)
                known = (r < rows)[:, None] & (g < groups)[None, :]
                scale = tl.load(scales + row[:, None] * groups + g[None, :], mask=known, other=0)
            else:
                scale = tl.load(scales + row, mask=r < rows, other=0)[:, None]
            if POWERS:
                power = scale.to(tl.int32)
                if OVER_MOST:
                    power += 127 + TOP - tl.load(most + row, mask=r < rows, other=0).to(tl.int32)[:, None]
                    power = tl.maximum(power, 0)
                # 0 stands for 2 ** -127, which fp32 has as a subnormal.
                by = tl.where(power > 0, power << 23, 1 << 22).to(tl.float32, bitcast=True)
            else:
                by = scale.to(tl.float32)
            if GROUP > 0:
                number = tl.reshape(tl.reshape(number, (BR, BC // GROUP, GROUP)) * by[:, :, None], (BR, BC))
            else:
                number = number * by
        result = number.to(out.dtype.element_ty)
    if TURNED:
        at = (matrix * width + c)[:, None] * rows + r[None, :]
        tl.store(out + at, tl.trans(result), mask=(c < width)[:, None] & (r < rows)[None, :])
    else:
        inside = (r < rows)[:, None] & (c < width)[None, :]
        tl.store(out + row[:, None] * width + c[None, :], result, mask=inside)


def unpacked(
    codes: torch.Tensor,
    format: str,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
    most: torch.Tensor | None = None,
    turned: bool = False,
) -> torch.Tensor:
    """codes uint8 [.., out, in / 2] -> [.., out, in]; turned: [.., in, out].

    format: int4, e2m1 or nf4. scales [.., out, groups], uint8: powers of two; most uint8 [.., out, 1]: they are taken
    over that, times 2 ** 6, as fp8 has room for it."""
    *before, rows, half = codes.shape
    width = 2 * half
    matrices = codes[..., 0, 0].numel() if rows and half else 0
    out = torch.empty(*before, *((width, rows) if turned else (rows, width)), dtype=dtype, device=codes.device)
    if not matrices:
        return out
    groups = scales.shape[-1] if scales is not None else 1
    table = nf4.table(codes.device) if format == "nf4" else codes
    t = UNPACK_TURNED if turned else UNPACK
    grid = (triton.cdiv(width, t.cols), triton.cdiv(rows, t.rows), matrices)
    _unpack[grid](
        codes, codes if scales is None else scales, codes if most is None else most, table, out, rows, width,
        GROUP=width // groups if groups > 1 else 0, FORMAT=format, SCALED=scales is not None,
        POWERS=scales is not None and scales.dtype == torch.uint8, OVER_MOST=most is not None, TOP=6, TURNED=turned,
        BR=t.rows, BC=t.cols, num_warps=t.warps,
    )  # fmt: skip
    return out
