"""Positions in time, height and width, and the modality of each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from erniekit.data.types import IMAGE, TEXT, VIDEO
from erniekit.data.vision.rules import PositionRule, VisionTokens


def modality_of(ids: np.ndarray, videos: Sequence[bool], counts: Sequence[int], tokens: VisionTokens) -> np.ndarray:
    """uint8 [n]. The marks around a picture or video are IMAGE, as they were in training."""
    out = np.full(len(ids), TEXT, np.uint8)
    out[np.isin(ids, tokens.marks)] = IMAGE
    kinds = np.repeat(np.array([VIDEO if video else IMAGE for video in videos], np.uint8), np.array(counts, int))
    out[ids == tokens.placeholder] = kinds
    return out


def positions_of(
    ids: np.ndarray,
    grids: Sequence[Sequence[int]],
    tokens: VisionTokens,
    merge: int = 2,
    temporal: int = 2,
    rule: PositionRule = "erniekit",
) -> tuple[np.ndarray, int]:
    """int32 [n, 3] (t, h, w), and the next position.

    Text counts on; the tokens of a picture lie on its grid, from the position it begins at. What follows goes on behind
    the largest of the three (ERNIEKit, vLLM), or behind the longer side of the picture, however many frames a video has
    (transformers).
    """
    out = np.empty((len(ids), 3), np.int32)
    seen = np.flatnonzero(ids == tokens.placeholder)
    at = place = used = 0
    for grid in grids:
        t, h, w = merged(grid, merge, temporal)
        start = int(seen[used])
        out[at:start] = (place + np.arange(start - at))[:, None]
        place += start - at
        lattice = np.stack(np.meshgrid(np.arange(t), np.arange(h), np.arange(w), indexing="ij"), -1).reshape(-1, 3)
        at = start + len(lattice)
        out[start:at] = place + lattice
        place += max(h, w) if rule == "transformers" else max(t, h, w)
        used += len(lattice)
    out[at:] = (place + np.arange(len(ids) - at))[:, None]
    return out, place + len(ids) - at


def merged(grid: Sequence[int], merge: int, temporal: int) -> tuple[int, int, int]:
    """What the resampler makes of a grid of patches."""
    t, h, w = grid
    return max(1, t // temporal), h // merge, w // merge
