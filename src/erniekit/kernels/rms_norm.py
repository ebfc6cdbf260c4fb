"""RMSNorm, the reference: normalise in fp32 (float64 stays), cast back, then scale, as HF and Paddle do. Called by
add_norm.py."""

from __future__ import annotations

import torch

from erniekit.kernels.precision import at_least_fp32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = at_least_fp32(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
