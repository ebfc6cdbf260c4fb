"""Rotary positions: angles in fp32 or float64, and the two ways families pair up channels. Called by models/layers.

B batch, L length, N heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from erniekit.kernels.precision import at_least_fp32


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: dict[str, Any] | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """theta^(-2i/D) for i in 0..D/2-1, stretched by `scaling` (linear, llama3)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(dtype) / head_dim
    freq = 1.0 / theta**exponents
    if not scaling or scaling["rope_type"] == "default":
        return freq
    if scaling["rope_type"] == "linear":
        linear: torch.Tensor = freq / scaling["factor"]
        return linear
    # llama3: long wavelengths are divided by `factor`, short ones kept, those between blended smoothly.
    wavelength = 2 * math.pi / freq
    old_len = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = ((old_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    blended: torch.Tensor = (1 - blend) * freq / scaling["factor"] + blend * freq
    return blended


def cos_sin(positions: torch.Tensor, freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [B, L] -> cos, sin [B, L, 1, D/2] in freq's dtype."""
    angles = (positions[..., None].to(freq.dtype) * freq)[:, :, None, :]
    return angles.cos(), angles.sin()


def cos_sin_of_axes(
    positions: torch.Tensor, freq: torch.Tensor, sections: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [B, L, 3] (t, h, w) -> cos, sin [B, L, 1, D/2] in freq's dtype. sections: slots turned by h, by w and
    by t; the first two alternate, the last are the slowest."""
    by_side, by_time = sections[0] + sections[1], sections[2]
    axes = torch.tensor([1 + slot % 2 for slot in range(by_side)] + [0] * by_time, device=positions.device)
    angles = (positions.to(freq.dtype)[..., axes] * freq)[:, :, None, :]
    return angles.cos(), angles.sin()


def frame_cos_sin(
    grids: list[tuple[int, int, int]], merge: int, head_dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches' two-dimensional positions in their frames -> cos, sin [P, 1, D/2] in fp32: the first half of the slots
    is turned by the row, the second by the column. Patches come in merge x merge blocks."""
    freq = inverse_frequencies(head_dim // 2, theta, None, device)
    # Made on the device: a copy of so many from ordinary memory would wait for all that was launched before.
    frames: dict[tuple[int, int], torch.Tensor] = {}
    for h, w in {(h, w) for _, h, w in grids}:
        row, column = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
        both = torch.stack((row, column), -1).view(h // merge, merge, w // merge, merge, 2)
        frames[h, w] = both.transpose(1, 2).reshape(-1, 2)
    places = [frames[h, w].repeat(t, 1) for t, h, w in grids]
    joined = torch.cat(places) if places else torch.zeros(0, 2, dtype=torch.int64, device=device)
    angles = (joined[..., None].float() * freq).flatten(1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """ERNIE: channels (2i, 2i+1) form a pair; rotated in fp32 or better and cast back. x [B, L, N, D]."""
    wide = at_least_fp32(x)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """LLaMA: channels (i, i + D/2) form a pair; cos and sin in the model's dtype, as HF computes it."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


ROTATIONS = {"pairs": rotate_pairs, "halves": rotate_halves}
