"""All experts in one call: rows sorted by expert times that expert's weight. Called by models/layers/experts.py.

R rows, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ALIGNED = 8  # widths in 16 bit are multiples of this: what the kernel's tiles can load


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, in], weight [E, out, in], ends int32 [E] (one past each expert's last row) -> [R, out].

    Rows past the last end belong to nobody: what comes out there, and the gradient that goes back, is undefined (see
    `of_somebody`). A weight without gradient forms none.
    """
    if rows.shape[0] and _fits(rows, weight):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    return reference(rows, weight, ends)


def of_somebody(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zeros past the last end, in values and in gradients. torch's kernel leaves those rows as it found them, both
    ways, so what may hold some goes through this before and after."""
    known = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(known[:, None], rows, 0)


def reference(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The definition: one product an expert. Waits for the device to know the ends."""
    bounds = [0, *ends.tolist()]
    out = [F.linear(rows[a:b], w) for a, b, w in zip(bounds, bounds[1:], weight.unbind(0))]
    out.append(rows.new_zeros(rows.shape[0] - bounds[-1], weight.shape[1]))
    return torch.cat(out)


def _fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """torch's kernel: 16-bit on the device, with widths its tiles can load; small CPU products are quick in a loop."""
    aligned = all(n % ALIGNED == 0 for n in weight.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 == weight.dtype and aligned and hasattr(F, "grouped_mm")
