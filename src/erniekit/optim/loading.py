"""A parameter's moments out of a checkpoint, in whatever form that has them. Used by adamw.py.

The same form is copied bit for bit. Another one (a resume with other settings, or a layout that cuts rows inside a
block of the stored scales) is unpacked and packed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from erniekit.kernels import moments8
from erniekit.kernels.position_noise import TensorPart, draws
from erniekit.optim.storage import MOMENTS, SCALES, stored_name

BLOCKS = tuple(2**k for k in range(8, 3, -1))  # that a checkpoint may have


def load_moments(
    name: str, state: dict[str, torch.Tensor], place: TensorPart, stored: Mapping[str, torch.Tensor]
) -> bool:
    """Into `state`; False where the checkpoint has none."""
    if any(f"{name}/{key}" not in stored for key in MOMENTS):
        return False
    block = next((b for b in BLOCKS if stored_name(name, SCALES[0], b) in stored), 0)
    block_size = place.block if SCALES[0] in state else 0
    if block == block_size:
        for key, kept in state.items():
            if key != "step":
                kept.copy_(stored[stored_name(name, key, block)])
        return True
    m, v = (stored[f"{name}/{key}"] for key in MOMENTS)
    if block:
        scales = moments8.Scales(*(stored[stored_name(name, key, block)] for key in SCALES))
        m, v = _decoded(m, v, scales, block, place.first_column % block)
    if not block_size:
        for key, value in zip(MOMENTS, (m, v)):
            state[key].copy_(value)
        return True
    drawn = draws(place, state["step"], m.shape[0], m.shape[1], 1).to(m.device)
    *codes, scales = moments8.encode(m.float(), v.float(), drawn, block_size)
    for key, value in zip((*MOMENTS, *SCALES), (*codes, *scales)):
        state[key].copy_(value)
    return True


def _decoded(
    m: torch.Tensor, v: torch.Tensor, scales: moments8.Scales, block: int, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """shift: columns of the first block that are another rank's."""
    m, v = (F.pad(codes, (shift, 0)) for codes in (m, v))
    m, v = moments8.decode(m, v, scales, block)
    return m[:, shift:], v[:, shift:]
