"""How large a picture becomes: both sides multiples of patch and merge, the area within bounds. ERNIEKit's rule."""

from __future__ import annotations

import math

from erniekit.data.media.limits import SIDES, MediaError


def fitted(height: int, width: int, least: int, most: int, factor: int = 28, squeeze: bool = False) -> tuple[int, int]:
    """(height, width) of `least` to `most` pixels. squeeze: a strip of more than 1 : 200 becomes one of 1 : 200, as in
    ERNIEKit; otherwise it is refused, as its content would be distorted beyond use."""
    if max(height, width) > SIDES * min(height, width):
        if not squeeze:
            raise MediaError("strip", f"one side is more than {SIDES} times the other ({width} x {height})")
        short = max(factor, round(min(height, width) / factor) * factor)
        long = short * SIDES // factor * factor
        height, width = (long, short) if height > width else (short, long)
    high, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        high, wide = (math.floor(side / scale / factor) * factor for side in (height, width))
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    if not least <= high * wide <= most or not high or not wide:
        raise MediaError("strip", f"{width} x {height} cannot be brought to {least:,} to {most:,} pixels")
    return high, wide
