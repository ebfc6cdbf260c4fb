"""Uniform noise on embeddings, drawn by counters: the same bits for the same token whatever the device and layout.

Used by models/layers/decoder.py; data/embedding_noise.py makes keys and sizes. B batch, L length, H hidden.
"""

from __future__ import annotations

import torch

from erniekit.kernels.position_noise import COLUMN, mix, signed

UNIT = 2.0**-31  # of a signed 32-bit number: [-1, 1)


def with_noise(x_BLH: torch.Tensor, keys_BL: torch.Tensor, sizes_BL: torch.Tensor) -> torch.Tensor:
    """x + size * u with u uniform in [-1, 1), of each element its own."""
    column = torch.arange(x_BLH.shape[-1], dtype=torch.int32, device=x_BLH.device)
    drawn = mix(mix(keys_BL)[..., None] ^ (column * signed(COLUMN)))
    return x_BLH + (drawn.float() * (sizes_BL * UNIT)[..., None]).to(x_BLH.dtype)
