"""The precision of sums, roots and exponentials inside an operation. Called by the definitions in this folder."""

from __future__ import annotations

import torch


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """x in fp32; float64 stays, so that a model in float64 computes the same on every kind of device."""
    return x if x.dtype == torch.float64 else x.float()
