"""The time of a frame, drawn into its upper left corner, as the models were trained: Roboto, a tenth of the short side,
black with a white edge. The font in fonts/ is the file that ERNIEKit draws with; its licence is next to it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.data.media.frames import stamp_text

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont

FONT = Path(__file__).with_name("fonts") / "Roboto-Regular.ttf"


def draw_stamp(picture: Picture, seconds: float) -> Picture:
    """On a picture that is the caller's own."""
    from PIL import ImageDraw

    size = min(picture.size) // 10
    if size < 1:  # no font is that small
        return picture
    ImageDraw.Draw(picture).text(
        (0, 0),
        f"time: {stamp_text(seconds)}",
        font=_font(size),
        fill=(0, 0, 0),
        stroke_width=size // 10,
        stroke_fill=(255, 255, 255),
    )
    return picture


@lru_cache(maxsize=8)
def _font(size: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(str(FONT), size)


def layout() -> str:
    """How letters are spaced: by libraqm, as in training, or by Pillow itself where that is missing, a pixel off here
    and there. Part of every fingerprint."""
    from PIL import features

    return "raqm" if features.check("raqm") else "basic"
