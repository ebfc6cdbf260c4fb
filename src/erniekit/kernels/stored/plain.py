"""Weights as numbers of their own dtype, fp32 or 16 bit: what is trained, and what everything starts as."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from erniekit.kernels.grouped_gemm import grouped_product
from erniekit.kernels.quantised_rows import Rows
from erniekit.kernels.stored.base import Agree, Stored, WeightKind
from erniekit.weight_kinds import PLAIN


class Plain(WeightKind):
    name = PLAIN
    as_it_lies = True

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        return Stored(weight)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        return weight.data.to(dtype)

    def product(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        return F.linear(x, weight.data)

    def turned_product(self, grad: torch.Tensor, weight: Stored) -> torch.Tensor:
        return grad @ weight.data

    # In place: else the card would first copy the one term to where the sum goes. The small product first: the large
    # one then adds to it at the end of its own work, which measured quicker.

    def product_plus(
        self, x: torch.Tensor, weight: Stored, low: torch.Tensor, factor: torch.Tensor, alpha: float
    ) -> torch.Tensor:
        return scaled_product(low, factor, alpha).addmm_(x, weight.data.t())

    def turned_product_plus(
        self, grad: torch.Tensor, weight: Stored, low: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        return scaled_product(low, factor, 1.0).addmm_(grad, weight.data)

    def grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        return grouped_product(rows, weight.data.transpose(1, 2), ends)

    def turned_grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        return grouped_product(rows, weight.data, ends)


def scaled_product(a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha * a b, rounded once."""
    return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=alpha)
