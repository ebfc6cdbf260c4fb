"""All experts in one call: rows sorted by expert times that expert's matrix, and the sums of outer products that are
its gradient. The plain-torch definition is a loop over experts.

Called by kernels/stored and by the expert op's steps. R rows, E experts, `ends` int32 [E] one past each expert's last
row; rows past the last end belong to no expert: what comes out there is undefined.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from erniekit.kernels import quack_gemm
from erniekit.kernels.blocked_products import blocked_outer, blocked_product
from erniekit.kernels.low_rank import Tail
from erniekit.kernels.selection import ALIGNED, ExpertFacts, ProductFacts, chosen


def spans(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Waits for the device, to read the ends."""
    bounds = [0, *ends.tolist()]
    return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(bounds)))


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, D], weight [E, D, W] of any strides -> [R, W]."""
    if not rows.shape[0]:  # vision experts of a batch of text: nothing to compute
        return rows.new_zeros(0, weight.shape[2])
    by = implementation(rows, weight)
    if by == "loop":
        return product_reference(rows, weight, ends)
    if by == "blocks":
        return blocked_product(rows, weight, ends)
    width = weight.shape[2]
    more, wider = -weight.shape[1] % ALIGNED, -width % ALIGNED
    if more or wider:
        rows, weight = F.pad(rows, (0, more)), F.pad(weight, (0, wider, 0, more))
    rows = rows.contiguous()
    out = quack_gemm.grouped(rows, weight, ends) if by == "quack" else F.grouped_mm(rows, weight, offs=ends)
    return out[:, :width] if wider else out


def grouped_product_plus(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tails: list[Tail], scale: float
) -> torch.Tensor:
    """`grouped_product` + scale * the sum of z factor over tails (z [R, n], factor [E, n, W]), rounded once. Only where
    `adds_in_product` is true."""
    from erniekit.kernels.triton import grouped_products

    if not weight.is_contiguous() and not weight.transpose(1, 2).is_contiguous():
        weight = weight.contiguous()
    return grouped_products.in_bf16(rows.contiguous(), weight, ends, tails, scale)


def adds_in_product(rows: torch.Tensor, out: int, tails: list[Tail], scale: float) -> bool:
    """Whether updates can be added in the pass of a product that is `out` wide."""
    ranks = tuple(z.shape[1] for z, _ in tails)
    facts = ExpertFacts(rows.device, rows.dtype, rows.shape[1], out, ranks)
    if not rows.shape[0] or chosen("experts' products with updates", facts) != "triton":
        return False
    from erniekit.kernels.triton import grouped_products

    return grouped_products.takes(tails, scale, rows.dtype)


def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left [R, M], right [R, N] -> left^T @ right, expert by expert [E, M, N]."""
    if not left.shape[0]:
        return left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    by = implementation(left, right)
    if by == "loop":
        return outer_reference(left, right, ends)
    if by == "blocks":
        return blocked_outer(left, right, ends)
    M, N = left.shape[1], right.shape[1]
    left, right = _aligned(left), _aligned(right)
    out = F.grouped_mm(left.t(), right, offs=ends)
    return out if out.shape[1:] == (M, N) else out[:, :M, :N]


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Columns of zeros up to a width that the kernel's tiles can load."""
    more = -rows.shape[1] % ALIGNED
    return F.pad(rows, (0, more)) if more else rows.contiguous()


def product_reference(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The definition: one product an expert, zeros past the last end."""
    out = [rows[span] @ weight[e] for e, span in spans(ends)]
    done = sum(part.shape[0] for part in out)
    return torch.cat([*out, rows.new_zeros(rows.shape[0] - done, weight.shape[2])])


def outer_reference(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.stack([left[span].t() @ right[span] for _, span in spans(ends)])


def implementation(rows: torch.Tensor, other: torch.Tensor) -> str:
    """Which one multiplies these, by selection.py."""
    return chosen("grouped products", ProductFacts(rows.device, torch.promote_types(rows.dtype, other.dtype)))
