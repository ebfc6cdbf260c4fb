"""Weights as integers with a scale for each row: the rule of Paddle's `weight_quantize`, and its values bit for bit.

scale = bf16(largest magnitude of the row / 127 or 7); an integer is weight / scale rounded to the nearest, halves away
from zero, and cut to +-127 or +-7. Rows of zeros are zeros. Called by kernels/stored and by what writes such files.
"""

from __future__ import annotations

import torch

CHUNK = 4096  # rows that are rounded at a time: the steps between take several times their memory


def largest(weight: torch.Tensor) -> torch.Tensor:
    """fp32 [.., 1], of each row. Without columns (a rank without heads): 0."""
    if not weight.shape[-1]:
        return weight.new_zeros(*weight.shape[:-1], 1, dtype=torch.float32)
    return magnitude(weight).unsqueeze(-1)


def magnitude(weight: torch.Tensor) -> torch.Tensor:
    """The largest of the last dimension, fp32, without a copy of the weight."""
    return torch.maximum(weight.amax(-1), -weight.amin(-1)).float()


def scale_of(most: torch.Tensor, highest: int) -> torch.Tensor:
    """bf16."""
    return (most / highest).to(torch.bfloat16)


def rounded(weight: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """fp32, integers from low to high."""
    by = scale.float()
    values = weight.float() / torch.where(by == 0, 1.0, by)
    size = values.abs()
    whole = size.floor()
    return (whole + (size - whole >= 0.5)).copysign_(values).clamp_(low, high)
