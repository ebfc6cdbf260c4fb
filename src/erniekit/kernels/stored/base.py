"""The interface of a kind of stored weight; products default to those of the unpacked weight.

A weight is a matrix [out, in], or [E, out, in] for E experts. Every tensor of a kind has the weight's rows as its first
dimension (its first two, by expert), and rows are packed independently of each other: a cut between rows is a slice of
each tensor. A cut between columns needs the same scales on both sides of it: `pack` is given `agree`, which returns the
maximum over the ranks that hold the same rows. R rows of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from erniekit.kernels.grouped_gemm import adds_in_product, grouped_outer, grouped_product, grouped_product_plus
from erniekit.kernels.low_rank import Tail
from erniekit.kernels.quantised_rows import Rows
from erniekit.weight_kinds import PLAIN

SLOTS = ("data", "scale", "extra")  # the tensors a kind may have

Agree = Callable[[torch.Tensor], torch.Tensor]  # the element-wise maximum over the ranks that hold the same rows


class Stored(NamedTuple):
    """The tensors of a weight and the name of its kind, in the order in which ops take them."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    extra: torch.Tensor | None = None
    kind: str = PLAIN

    def of_experts(self, count: int) -> Stored:
        """[E * out, ...] as [E, out, ...]."""
        data, scale, extra = (None if t is None else t.unflatten(0, (count, -1)) for t in self[:3])
        assert data is not None
        return Stored(data, scale, extra, self.kind)


def op_fields(name: str) -> list[tuple[str, str]]:
    """A stored weight among the arguments of an op: names and types, in the order of Stored."""
    return [(name, "Tensor"), *((f"{name}_{slot}", "Tensor?") for slot in SLOTS[1:]), (f"{name}_kind", "str")]


class WeightKind:
    """Stateless: one object serves all weights of its kind."""

    name = ""
    rows_in_fp8 = False  # its products take rows in fp8: see stored/fp8.py
    exact_in_fp8 = False  # its image in fp8 times its scales is the unpacked weight, bit for bit
    as_it_lies = False  # forward multiplies by its own bytes: nothing is unpacked into scratch memory first
    # Of kernels/selection.py: which choices its products come from, of a linear and of experts.
    operations: tuple[str, ...] = ()
    expert_operations: tuple[str, ...] = ("grouped products", "experts' products with updates")

    def why_not(self, device: torch.device, experts: bool) -> str | None:
        """Why a device cannot multiply by it; None: it can. experts: grouped products are needed too."""
        return None

    def fits(self, out: int, width: int) -> bool:
        """Whether a weight of these sizes can be held so."""
        return True

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        """weight [out, in], which the caller then frees."""
        raise NotImplementedError

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        """[.., out, in]."""
        raise NotImplementedError

    def shape(self, weight: Stored) -> tuple[int, int]:
        """(out, in), of one expert. Also of tensors without memory. The default is for a `data` with one number for
        each of the weight's: a kind that puts several columns into one overrides it."""
        return weight.data.shape[-2], weight.data.shape[-1]

    # --- products; `turned` ones are with the transpose, as gradients need them ---

    def product(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        """x [R, in] -> x W^T [R, out]."""
        return F.linear(x, self.unpack(weight, x.dtype))

    def turned_product(self, grad: torch.Tensor, weight: Stored) -> torch.Tensor:
        """grad [R, out] -> grad W [R, in]."""
        return grad @ self.unpack(weight, grad.dtype)

    def product_plus(
        self, x: torch.Tensor, weight: Stored, low: torch.Tensor, factor: torch.Tensor, alpha: float
    ) -> torch.Tensor:
        """x W^T + alpha * low @ factor, low [R, rank], factor [rank, out]."""
        return self.product(x, weight).addmm_(low, factor, alpha=alpha)

    def turned_product_plus(
        self, grad: torch.Tensor, weight: Stored, low: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        """grad W + low @ factor, factor [rank, in]."""
        return self.turned_product(grad, weight).addmm_(low, factor)

    def grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """rows [R, in] sorted by expert, `ends` int32 [E] one past each expert's last row -> [R, out]. What comes out
        past the last end is undefined."""
        assert isinstance(rows, torch.Tensor)
        return grouped_product(rows, self.unpack(weight, dtype).transpose(1, 2), ends)

    def grouped_plus(
        self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype, tails: list[Tail], scale: float
    ) -> torch.Tensor | None:
        """`grouped` + scale * the sum of z factor over tails (z [R, n], factor [E, n, out]); None: not in one pass."""
        assert isinstance(rows, torch.Tensor)
        if not adds_in_product(rows, self.shape(weight)[0], tails, scale):
            return None
        return grouped_product_plus(rows, self.unpack(weight, dtype).transpose(1, 2), ends, tails, scale)

    def turned_grouped(self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """rows [R, out] -> [R, in]."""
        assert isinstance(rows, torch.Tensor)
        return grouped_product(rows, self.unpack(weight, dtype), ends)

    def turned_grouped_plus(
        self, rows: Rows, weight: Stored, ends: torch.Tensor, dtype: torch.dtype, tails: list[Tail], scale: float
    ) -> torch.Tensor | None:
        """The same of `turned_grouped`, factor [E, n, in]."""
        assert isinstance(rows, torch.Tensor)
        if not adds_in_product(rows, self.shape(weight)[1], tails, scale):
            return None
        return grouped_product_plus(rows, self.unpack(weight, dtype), ends, tails, scale)

    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: Stored, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of a weight that is trained: grad [R, out], x [R, in] -> [out, in]; with ends, by expert, [E, out, in]."""
        return grad.t().mm(x) if ends is None else grouped_outer(grad, x, ends)

    def seen(self, rows: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """What the kind observes of the rows of a product, fp32 [1]; empty: nothing."""
        return rows.new_empty(0, dtype=torch.float32)

    def turned_factor(self, weight: Stored) -> torch.Tensor | None:
        """What the columns of rows are multiplied by before they are rounded for a turned product, fp32 [.., out];
        None: nothing. For kinds that take rows in fp8."""
        return None
