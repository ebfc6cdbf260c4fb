"""Weights whose products are in fp8 with static scales, one a tensor: trained (QAT), or stored in fp8 already.

data: numbers of their own dtype, which are rounded each time they are multiplied by (what is trained is what fp8 cannot
show, yet), or e4m3, rotated. scale: of the weight, of each expert. extra: of the rows that it is multiplied with.
Gradients are straight-through: that of rows is multiplied with the rounded weight, that of the weight with the rows as
they were, unless a format for gradients is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from erniekit.kernels import fp8_qat
from erniekit.kernels.fp8_qat import E4M3, E5M2
from erniekit.kernels.grouped_gemm import grouped_product
from erniekit.kernels.quantised_rows import Rows
from erniekit.kernels.stored.base import Stored, WeightKind
from erniekit.kernels.stored.plain import Plain

FORMATS = {"": None, "e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class StaticFormat:
    """block: of the rotation, 0: none. rows, weights: formats of gradients on their way to rows and to weights."""

    block: int = 0
    rows: str = ""
    weights: str = ""

    @property
    def name(self) -> str:
        return f"fp8_static/{self.block}/{self.rows}/{self.weights}"


class Fp8Static(WeightKind):
    operations = ("fp8 products",)
    expert_operations = ("experts' fp8 products", "grouped products")  # of gradients, multiplied out

    def __init__(self, form: StaticFormat | None = None) -> None:
        self.form = form or StaticFormat()
        self.name = self.form.name

    def seen(self, rows: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        return _seen(rows, ends, self.form.block)

    def image(self, weight: Stored) -> torch.Tensor:
        """e4m3 [.., out, in], rotated."""
        if weight.data.dtype == E4M3:
            return weight.data
        return fp8_qat.to_fp8(fp8_qat.rotated(weight.data, self.form.block), _by_matrix(weight))

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        return fp8_qat.rotated(self.image(weight).float() * _by_matrix(weight), self.form.block).to(dtype)

    def rounded(self, rows: torch.Tensor, weight: Stored) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a product in fp8, and their scale, fp32 [1]."""
        assert weight.extra is not None
        scale = weight.extra.reshape(-1)[:1]
        return fp8_qat.to_fp8(fp8_qat.rotated(rows, self.form.block), scale), scale

    def product(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        return fp8_qat.product(*self.rounded(x, weight), self.image(weight), _scales(weight), x.dtype)

    def grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        return fp8_qat.grouped(*self.rounded(rows, weight), self.image(weight), _scales(weight), ends, dtype)

    def turned_product(self, grad: torch.Tensor, weight: Stored) -> torch.Tensor:
        form = FORMATS[self.form.rows]
        if form is None:
            return grad @ self.unpack(weight, grad.dtype)
        small, scale = _fitted(grad, form)
        image = self.image(weight).view(torch.uint8).t().contiguous().view(E4M3)
        out = fp8_qat.product(small, scale, image, _scales(weight), grad.dtype)
        return fp8_qat.rotated(out, self.form.block).to(grad.dtype)

    def turned_grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Fp8 gradients are multiplied out again: no grouped product takes e5m2."""
        assert isinstance(rows, torch.Tensor)
        form = FORMATS[self.form.rows]
        if form is not None:
            small, scale = _fitted(rows, form, ends)
            rows = (small.float() * scale).to(dtype)
        return grouped_product(rows, self.unpack(weight, dtype), ends)

    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: Stored, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        form = FORMATS[self.form.weights]
        if form is None:
            return fp8_qat.outer(grad, x, ends)
        small, gs = _fitted(grad, form, ends)
        small_x, xs = self.rounded(x, weight)
        # Every number of fp8 is one of bf16: the same values as in an fp8 product, whatever multiplies them.
        out = fp8_qat.outer(small.to(x.dtype), small_x.to(x.dtype), ends)
        return fp8_qat.rotated(out * (gs * xs).to(out.dtype), self.form.block).to(x.dtype)


class PlainObserved(Plain):
    """Plain products that report their rows' largest number: from which a first scale is taken."""

    def __init__(self, block: int = 0) -> None:
        self.block, self.name = block, f"measured/{block}"

    def seen(self, rows: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        return _seen(rows, ends, self.block)


def _seen(rows: torch.Tensor, ends: torch.Tensor | None, block: int) -> torch.Tensor:
    """fp32 [1]: the largest number of what is rounded; rows past the last end are no expert's."""
    each = fp8_qat.rotated(rows, block) if block else rows
    if ends is None or not rows.shape[0]:
        return fp8_qat.largest(each).reshape(1)
    valid = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(valid, each.detach().abs().amax(-1).float(), 0.0).amax().reshape(1)


def _fitted(
    grad: torch.Tensor, form: torch.dtype, ends: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient in fp8 and its scale, fp32 [1]: of its own largest number."""
    scale = fp8_qat.scale_of(_seen(grad, ends, 0), fp8_qat.HIGHEST[form])
    return fp8_qat.to_fp8(grad, scale, form), scale


def _scales(weight: Stored) -> torch.Tensor:
    """fp32 [1], or [E] of experts."""
    assert weight.scale is not None
    return weight.scale.reshape(-1)


def _by_matrix(weight: Stored) -> torch.Tensor:
    """The same, to be multiplied with data."""
    scale = _scales(weight)
    return scale.reshape(-1, 1, 1) if weight.data.dim() == 3 else scale.reshape(1, 1)
