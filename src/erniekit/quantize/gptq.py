"""Rounding a weight: to nearest, or with each column's error carried into those behind it (GPTQ, arXiv 2210.17323).

Called by layer_weights.py for one weight, or one expert's, at a time. R rows (outputs), K columns (inputs). The Hessian
is X^T X over the calibration tokens, [K, K] fp32; the error of a rounded weight is |X (W - W')^T|^2 / |X W^T|^2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from erniekit.kernels.compressed import factors, rounded, to_grid
from erniekit.quant_schemes import Scheme

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
BLOCK = 128  # columns whose errors are carried on together
_MOST_DAMPING = 10.0


class Rounded(NamedTuple):
    weight: torch.Tensor  # fp32 [R, K], on the grid of the scales
    error: float | None  # relative, squared; None: no tokens were seen
    nearest_error: float | None  # the same of round-to-nearest


def round_weight(
    weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme, hessian: torch.Tensor | None, compensate: bool
) -> Rounded:
    """weight [R, K], scale [R, G]. Without a Hessian it is rounded to nearest and no error is known."""
    nearest = rounded(weight, scale, scheme)
    if hessian is None:
        return Rounded(nearest, None, None)
    plain = weight.float()
    whole = _row_errors(plain, hessian).sum()
    if not whole > 0:  # all inputs, or the weight itself, are zero
        return Rounded(nearest, 0.0, 0.0)
    by_nearest = _row_errors(plain - nearest, hessian)
    if not compensate:
        return Rounded(nearest, float(by_nearest.sum() / whole), float(by_nearest.sum() / whole))
    carried = compensated(plain, scale, scheme, hessian)
    by_carried = _row_errors(plain - carried, hessian)
    # Rows are independent of each other: one that did not gain keeps its nearest values.
    better = by_carried < by_nearest
    best = torch.where(better[:, None], carried, nearest)
    error = torch.where(better, by_carried, by_nearest).sum() / whole
    return Rounded(best, float(error), float(by_nearest.sum() / whole))


def compensated(weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme, hessian: torch.Tensor) -> torch.Tensor:
    """Columns in the order of their inputs' size; scales are those of the weight as it was, so that their groups stay
    in file order whatever the order of the columns."""
    order = hessian.diagonal().argsort(descending=True, stable=True)
    width = weight.shape[1] // scale.shape[1]
    steps = factors(scale, scheme).repeat_interleave(width, 1)[:, order]
    left = weight[:, order].clone()
    upper = _inverse_factor(hessian[order][:, order])
    out = torch.empty_like(left)
    for start in range(0, left.shape[1], BLOCK):
        stop = min(start + BLOCK, left.shape[1])
        errors = torch.empty(len(left), stop - start, device=left.device)
        for k in range(start, stop):
            out[:, k] = to_grid(left[:, k] / steps[:, k], scheme) * steps[:, k]
            errors[:, k - start] = (left[:, k] - out[:, k]) / upper[k, k]
            left[:, k + 1 : stop] -= errors[:, k - start, None] * upper[None, k, k + 1 : stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return out[:, order.argsort()]


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse. An input that is always zero is decoupled."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean, damping = diagonal.mean(), DAMPING
    while True:
        diagonal += damping * mean
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
        assert damping <= _MOST_DAMPING, "a positive matrix stays indefinite"


def _row_errors(weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """|X w^T|^2 of each row w."""
    return ((weight @ hessian) * weight).sum(1).clamp(min=0)
