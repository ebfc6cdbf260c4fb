"""Orthogonal directions of matrices by Newton-Schulz iterations: what Muon steps along. Used by optim/muon.py.

Of G = U S V^T the five steps give about U V^T: singular values between 0.7 and 1.2 instead of 1, which trains as well
(Jordan et al., Muon, 2024; the coefficients are theirs, and torch.optim.Muon's).
"""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7


def orthogonalised(matrices: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """[n, rows, columns] -> the same shape, each matrix by itself. In the dtype of the matrices: bf16 is enough."""
    a, b, c = COEFFICIENTS
    x = matrices
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
