"""Weights in fp8 (e4m3) with a scale for each row, multiplied in fp8; and the base of other kinds that are.

Held once, as rows. Forward multiplies by it as it lies and applies the scales to the result. For the turned product its
bytes are transposed into scratch memory; the scales then lie along what is summed over, so that they go into the rows
before those are rounded. Both directions multiply by exactly the same weight.
"""

from __future__ import annotations

import torch

from erniekit.kernels import fp8_cards, fp8_product
from erniekit.kernels.low_rank import Tail
from erniekit.kernels.quantised_rows import (
    HIGHEST,
    LEAST,
    Rows,
    Scaled,
    dequantised,
    quantised,
    quantised_by_expert,
    quantised_with,
    rounded,
)
from erniekit.kernels.stored.base import Agree, Stored, WeightKind

CHUNK = 4096  # rows that are rounded at a time where their scales are agreed upon


class MultipliedInFp8(WeightKind):
    """A kind defines its image in fp8, and the scales of its rows."""

    rows_in_fp8 = True
    operations = ("fp8 products",)
    expert_operations = ("experts' fp8 products", "experts' products with updates")

    def image(self, weight: Stored) -> torch.Tensor:
        """fp8 [.., out, in], in scratch memory or the weight's own."""
        raise NotImplementedError

    def turned_image(self, weight: Stored) -> torch.Tensor:
        """fp8 [.., in, out], contiguous."""
        return fp8_product.transposed(self.image(weight))

    def row_scale(self, weight: Stored) -> torch.Tensor:
        """fp32 [.., out, 1]."""
        assert weight.scale is not None
        return weight.scale

    def why_not(self, device: torch.device, experts: bool) -> str | None:
        return fp8_cards.why_not(device, experts)

    def fits(self, out: int, width: int) -> bool:
        return out % fp8_cards.ALIGNED == 0 and width % fp8_cards.ALIGNED == 0

    def product(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        return fp8_product.product(*quantised(x), self.image(weight), self.row_scale(weight), x.dtype)

    def turned_product(self, grad: torch.Tensor, weight: Stored) -> torch.Tensor:
        small = quantised_with(grad, self.row_scale(weight).squeeze(-1))
        return fp8_product.product(*small, self.turned_image(weight), None, grad.dtype)

    def turned_factor(self, weight: Stored) -> torch.Tensor:
        return self.row_scale(weight).squeeze(-1)

    def grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return fp8_product.grouped(*_small(rows), self.image(weight), self.row_scale(weight), ends, dtype)

    def grouped_plus(
        self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype, tails: list[Tail], scale: float
    ) -> torch.Tensor | None:
        if not fp8_product.adds_in_product(_values(rows), self.shape(weight)[0], tails, scale, dtype):
            return None
        image, by = self.image(weight), self.row_scale(weight)
        return fp8_product.grouped_plus(*_small(rows), image, by, ends, tails, scale, dtype)

    def turned_grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """rows in fp8 already: with `turned_factor` in them."""
        small = self._turned_small(rows, weight, ends)
        return fp8_product.grouped(*small, self.turned_image(weight), None, ends, dtype)

    def turned_grouped_plus(
        self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype, tails: list[Tail], scale: float
    ) -> torch.Tensor | None:
        if not fp8_product.adds_in_product(_values(rows), self.shape(weight)[1], tails, scale, dtype):
            return None
        small = self._turned_small(rows, weight, ends)
        return fp8_product.grouped_plus(*small, self.turned_image(weight), None, ends, tails, scale, dtype)

    def _turned_small(self, rows: Rows, weight: Stored, ends: torch.Tensor) -> Scaled:
        return quantised_by_expert(rows, self.turned_factor(weight), ends) if isinstance(rows, torch.Tensor) else rows


def _values(rows: Rows) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else rows[0]


def _small(rows: Rows) -> Scaled:
    return quantised(rows) if isinstance(rows, torch.Tensor) else rows


class Fp8(MultipliedInFp8):
    name = "fp8"
    exact_in_fp8 = True
    as_it_lies = True

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        if agree is None:
            data, scale = quantised(weight)
            return Stored(data, scale, kind=self.name)
        # No columns at all: a rank without heads.
        mine = weight.abs().amax(-1, keepdim=True) if weight.shape[1] else weight.new_zeros(weight.shape[0], 1)
        most = agree(mine.float())
        scale = most.clamp(min=LEAST) / HIGHEST
        data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        for out, rows, scales in zip(data.split(CHUNK), weight.split(CHUNK), scale.split(CHUNK), strict=True):
            out.copy_(rounded(rows.float(), scales * HIGHEST))
        return Stored(data, scale, kind=self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        return dequantised(weight.data, weight.scale).to(dtype)

    def image(self, weight: Stored) -> torch.Tensor:
        return weight.data
