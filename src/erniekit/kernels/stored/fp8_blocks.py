"""Weights whose products are in fp8 with a scale for each block: 128 x 128 of a weight, 1 x 128 of rows and gradients.

For pre-training (`use_fp8`): scales are the blocks' own each time, so that nothing is kept or calibrated. All three
products of a linear round both of their sides to e4m3; those of a weight's gradient along the tokens. The values are
multiplied out again before the product: the numbers are those of block-wise fp8, the speed is that of compute_type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from erniekit.kernels import fp8_qat
from erniekit.kernels.fp8_qat import row_blocks, square_blocks
from erniekit.kernels.grouped_gemm import grouped_product
from erniekit.kernels.quantised_rows import Rows
from erniekit.kernels.stored.base import Stored, WeightKind


class Fp8Blocks(WeightKind):
    name = "fp8_blocks"

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        return square_blocks(weight.data, dtype)

    def product(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        return F.linear(row_blocks(x, x.dtype), self.unpack(weight, x.dtype))

    def turned_product(self, grad: torch.Tensor, weight: Stored) -> torch.Tensor:
        return row_blocks(grad, grad.dtype) @ self.unpack(weight, grad.dtype)

    def grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        return grouped_product(row_blocks(rows, dtype), self.unpack(weight, dtype).transpose(1, 2), ends)

    def turned_grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        return grouped_product(row_blocks(rows, dtype), self.unpack(weight, dtype), ends)

    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: Stored, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Along the tokens: 128 of one column share a scale. Of experts' rows those of two experts may share one."""
        left, right = (row_blocks(t.t(), x.dtype).t() for t in (grad, x))
        return fp8_qat.outer(left, right, ends)
