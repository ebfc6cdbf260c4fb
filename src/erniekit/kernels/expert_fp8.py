"""The expert block's frozen matrices, in 16 bit or in fp8, and the products with them. Called by expert_mlp.py.

In fp8 tokens are rounded before they are taken, so that one rounding serves all choices and half the bytes are written;
low ranks are of the tokens as they were. T tokens, K choices, R = T * K rows, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from erniekit.kernels import expert_mlp_rows, fp8_product
from erniekit.kernels.expert_mlp_rows import Low, Tail
from erniekit.kernels.fp8_product import Fp8Weight, Scaled

Rows = torch.Tensor | Scaled
EXTRAS = 3  # what an op is given beside the matrix: None each where it is in 16 bit


class Matrices(NamedTuple):
    """All experts' of one projection, [E, out, in]; the rest as in Fp8Weight, None: in 16 bit."""

    rows: torch.Tensor
    row_scale: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None


def matrices(weight: torch.Tensor | Fp8Weight) -> Matrices:
    return Matrices(*weight) if isinstance(weight, Fp8Weight) else Matrices(weight)


def taken(
    steps: Any,
    x: torch.Tensor,
    row_of: torch.Tensor,
    k: int,
    ends: torch.Tensor,
    lows: list[Low],
    weight: Matrices,
) -> tuple[Rows, torch.Tensor]:
    """Rows of tokens x [T, in] as the product with `weight` wants them, and their low ranks (expert_mlp_rows.take)."""
    if weight.row_scale is None:
        return steps.take(x, row_of, k, ends, lows)  # type: ignore[no-any-return]
    return steps.take_fp8(x, fp8_product.quantised(x), row_of, k, ends, lows)  # type: ignore[no-any-return]


def forward(
    steps: Any, rows: Rows, weight: Matrices, ends: torch.Tensor, tails: list[Tail], scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """rows W^T plus scale * the tails."""
    if weight.row_scale is None:
        return steps.product(rows, weight.rows.transpose(1, 2), ends, tails, scale)  # type: ignore[no-any-return]
    return _product(steps, rows, weight.rows, weight.row_scale, ends, tails, scale, dtype)


def backward(
    steps: Any, rows: Rows, weight: Matrices, ends: torch.Tensor, tails: list[Tail], dtype: torch.dtype
) -> torch.Tensor:
    """rows W plus the tails."""
    if weight.columns is None or weight.column_scale is None:
        return steps.product(rows, weight.rows, ends, tails)  # type: ignore[no-any-return]
    return _product(steps, rows, weight.columns, weight.column_scale, ends, tails, 1.0, dtype)


def _product(
    steps: Any,
    rows: Rows,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    ends: torch.Tensor,
    tails: list[Tail],
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    small = rows if isinstance(rows, tuple) else fp8_product.quantised(rows)
    out = fp8_product.grouped(*small, weight, weight_scale, ends, dtype)
    return steps.add_low(out, tails, scale, ends)  # type: ignore[no-any-return]


def take(
    x: torch.Tensor, small: Scaled, row_of: torch.Tensor, k: int, ends: torch.Tensor, lows: list[Low]
) -> tuple[Scaled, torch.Tensor]:
    """The definition: rows of tokens in fp8, `small`, with their scales; low ranks of the tokens x, as they were."""
    token = row_of // k
    x8, scale = small
    rows8 = x8.view(torch.uint8).index_select(0, token).view(x8.dtype)  # torch has no such selection of fp8
    _, low = expert_mlp_rows.take(x, row_of, k, ends, lows, keep=False)
    return (rows8, scale.index_select(0, token)), low
