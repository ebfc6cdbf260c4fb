"""Products of experts in fp8 and bf16 for Hopper cards, with scales and low-rank updates in the same pass.
Called by kernels/fp8_product.py and kernels/grouped_gemm.py, where they are defined.

A program has a tile of rows of one expert and of its weight's rows. Both come through tensor descriptors, which read on
past an expert's last row; what is computed from there is not stored. A low-rank update is a product of its own with the
same accumulators: what torch's grouped product writes is otherwise read and written once more for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from erniekit.kernels.low_rank import Tail
from erniekit.kernels.triton.expert_tiles import blocks_of, low_tile, narrow_tile, padded, rows_of_block, strides


class Shape(NamedTuple):
    rows: int
    cols: int
    depth: int  # of what is summed over, at a time
    warps: int
    stages: int


PRODUCT = Shape(128, 256, 128, 8, 4)  # in fp8
PRODUCT_16 = Shape(128, 256, 64, 8, 4)  # in bf16


@triton.jit
def _grouped(
    a, b, row_scale, weight_scale, ends, out, Z0, Z1, L0, L1, E, m0, m1, e0, r0, w0, e1, r1, w1, scale,
    N: tl.constexpr, K: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (N + BN - 1) // BN
    expert, first, left = rows_of_block(ends, E, tl.program_id(0) // tiles, BM, BE)
    if expert >= E:
        return
    column = (tl.program_id(0) % tiles) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if TURNED:
            # Past an expert's last row of K it reads the next one's: what they are multiplied by is 0 there.
            acc = tl.dot(a.load([first, k]), b.load([expert * K + k, column]), acc)
        else:
            acc = tl.dot(a.load([first, k]), b.load([expert * N + column, k]).T, acc)
    i, cols = tl.arange(0, BM), column + tl.arange(0, BN)
    live, rows = i < left, tl.minimum(i, left - 1)
    first, expert = first.to(tl.int64), expert.to(tl.int64)
    # What is added is scaled by `scale` as well: all of it at the end.
    if BY_ROW:
        by_row = tl.load(row_scale + first + rows)
        if P0 > 0:
            by_row = by_row / scale
        acc *= by_row[:, None]
    elif P0 > 0:
        acc *= 1.0 / scale
    if BY_COLUMN:
        acc *= tl.load(weight_scale + expert * N + cols, mask=cols < N, other=0.0)[None, :]
    if P0 > 0:
        i0 = tl.arange(0, P0)
        z0 = narrow_tile(Z0 + first * m0, rows, i0, m0, N0, P0)
        acc = tl.dot(z0, low_tile(L0 + expert * e0, i0, cols, r0, w0, N0, P0, N, N % BN == 0), acc)
        if P1 > 0:
            i1 = tl.arange(0, P1)
            z1 = narrow_tile(Z1 + first * m1, rows, i1, m1, N1, P1)
            acc = tl.dot(z1, low_tile(L1 + expert * e1, i1, cols, r1, w1, N1, P1, N, N % BN == 0), acc)
        acc *= scale
    at = out + (first + i)[:, None] * N + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])


def in_fp8(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    ends: torch.Tensor,
    tails: list[Tail],
    scale: float,
) -> torch.Tensor:
    """weight [E, N, K]; weight_scale None: ones."""
    return _launched(rows, weight, False, ends, tails, scale, PRODUCT, row_scale, weight_scale)


def in_bf16(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tails: list[Tail], scale: float
) -> torch.Tensor:
    """weight [E, K, N], contiguous itself or transposed."""
    turned = weight.is_contiguous()
    return _launched(rows, weight if turned else weight.transpose(1, 2), turned, ends, tails, scale, PRODUCT_16)


def _launched(
    rows: torch.Tensor,
    weight: torch.Tensor,
    turned: bool,
    ends: torch.Tensor,
    tails: list[Tail],
    scale: float,
    shape: Shape,
    row_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """weight contiguous, [E, K, N] if turned, else [E, N, K]."""
    (R, K), E, t = rows.shape, weight.shape[0], shape
    N = weight.shape[2] if turned else weight.shape[1]
    out = torch.empty(R, N, dtype=torch.bfloat16, device=rows.device)
    (Z0, L0), (Z1, L1) = [*tails, (None, None), (None, None)][:2]
    n0, n1 = (0 if Z is None else Z.shape[1] for Z in (Z0, Z1))
    m0, m1 = (0 if Z is None else Z.stride(0) for Z in (Z0, Z1))
    _grouped[(blocks_of(R, E, t.rows) * triton.cdiv(N, t.cols),)](
        TensorDescriptor.from_tensor(rows, [t.rows, t.depth]),
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [t.depth, t.cols] if turned else [t.cols, t.depth]),
        row_scale, weight_scale, ends, out, Z0, Z1, L0, L1, E, m0, m1, *strides(L0), *strides(L1), scale,
        N=N, K=K, N0=n0, N1=n1, P0=padded(n0), P1=padded(n1), BY_ROW=row_scale is not None,
        BY_COLUMN=weight_scale is not None, TURNED=turned, BM=t.rows, BN=t.cols, BK=t.depth,
        BE=triton.next_power_of_2(E), STAGES=t.stages, num_warps=t.warps,
    )  # fmt: skip
    return out


def takes(tails: list[Tail], scale: float, dtype: torch.dtype) -> bool:
    """Whether these updates, whose ranks selection.py has seen, can be added in a product's pass."""
    return len(tails) <= 2 and scale != 0 and all(z.dtype == dtype for z, _ in tails)
