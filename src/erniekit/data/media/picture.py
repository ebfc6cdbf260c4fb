"""A picture's header and pixels, by Pillow."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from erniekit.data.media.extra import not_installed
from erniekit.data.media.limits import MediaError, MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# A file says by its first bytes which it is, whatever its name. Others (vector graphics, astronomy, fonts) are refused.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
# Several pictures in a file of one of these play; in others, such as photographs with a depth map, the first is meant.
_PLAYS = ("GIF", "PNG", "WEBP", "AVIF")
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height


@dataclass(frozen=True)
class PictureHeader:
    width: int
    height: int
    animated: bool
    turned: bool  # its EXIF data swaps width and height


def open_header(content: bytes, name: str, limits: MediaLimits) -> Picture:
    """Opened, no pixel decoded."""
    try:
        from PIL import Image
    except ImportError:
        raise not_installed("Pillow", "reading pictures") from None
    Image.MAX_IMAGE_PIXELS = None  # `limits` decide, from the header
    try:
        Image.init()  # a Pillow may lack some of them
        picture = Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN])
    except Exception as error:
        raise MediaError("bad_picture", f"{name}: no picture that can be read ({_said(error)})") from None
    if picture.width * picture.height > limits.pixels:
        raise MediaError(
            "too_many_pixels",
            f"{name}: {picture.width:,} x {picture.height:,} pixels, more than media_max_pixels={limits.pixels:,}",
        )
    return picture


def read_header(content: bytes, name: str, limits: MediaLimits) -> PictureHeader:
    picture = open_header(content, name, limits)
    return PictureHeader(picture.width, picture.height, _animated(picture), _orientation(picture) in _SIDEWAYS)


def read_pixels(content: bytes, name: str, limits: MediaLimits, upright: bool) -> Picture:
    """RGB. upright: turned as its EXIF data say. Transparent parts lie on white; 16 bits of grey lose the lower 8."""
    picture = open_header(content, name, limits)
    try:
        picture.load()
        orientation = _orientation(picture) if upright else 1
        if picture.mode.startswith("I;16"):
            picture = _eight_bits(picture)
        return _turned(_on_white(picture).convert("RGB"), orientation)
    except Exception as error:
        raise MediaError("bad_picture", f"{name}: the picture is damaged ({_said(error)})") from None


def _eight_bits(picture: Picture) -> Picture:
    from PIL import Image

    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def _on_white(picture: Picture) -> Picture:
    from PIL import Image

    if picture.mode not in ("RGBA", "LA", "PA") and not (picture.mode == "P" and "transparency" in picture.info):
        return picture
    clear = picture.convert("RGBA")
    if clear.getchannel("A").getextrema()[0] == 255:
        return picture
    white = Image.new("RGBA", clear.size, (255, 255, 255))
    white.paste(clear, (0, 0), clear)
    return white


def _turned(picture: Picture, orientation: int) -> Picture:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }  # fmt: skip
    return picture.transpose(turns[orientation]) if orientation in turns else picture


def _animated(picture: Picture) -> bool:
    try:
        return picture.format in _PLAYS and bool(getattr(picture, "is_animated", False))
    except Exception:  # a damaged second frame: the first may be whole
        return False


def _orientation(picture: Picture) -> int:
    """1 where its EXIF data say nothing that can be read. Pillow would decode a PNG in search of them."""
    from PIL.Image import Exif

    try:
        if picture.format == "PNG":
            exif = Exif()
            exif.load(picture.info.get("exif", b""))
        else:
            exif = picture.getexif()
        value = exif.get(_ORIENTATION, 1)
        return value if isinstance(value, int) else 1
    except Exception:
        return 1


def _said(error: Exception) -> str:
    """Pillow's words where a person can use them; its errors also name objects, classes and bytes."""
    said = str(error).splitlines()[0][:160] if str(error) else ""
    if "cannot identify" in said:
        return f"its bytes are none of {', '.join(FORMATS)}"
    if "truncated" in said.lower():
        return "it breaks off"
    return said if said and not re.search(r"[<>_'\"\\]|\.\w|0x|Plugin", said) else "its data are not as the format says"
