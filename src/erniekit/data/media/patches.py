"""Pixels to patches, in the order that data/types.py's Vision names."""

from __future__ import annotations

import numpy as np


def to_patches(frames: np.ndarray, patch: int = 14, merge: int = 2) -> np.ndarray:
    """uint8 [t, height, width, 3] -> uint8 [t * h * w, 3 * patch * patch], h and w counted in patches."""
    count, high, wide, channels = frames.shape
    h, w = high // patch, wide // patch
    split = frames.reshape(count, h // merge, merge, patch, w // merge, merge, patch, channels)
    ordered = split.transpose(0, 1, 4, 2, 5, 7, 3, 6)
    return np.ascontiguousarray(ordered).reshape(count * h * w, channels * patch * patch)
