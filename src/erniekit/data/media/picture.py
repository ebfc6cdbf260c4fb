"""A picture's header and pixels, by Pillow."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from erniekit.data.media.extra import not_installed
from erniekit.data.media.limits import MediaError, MediaLimits, because

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# A file's first bytes show which it is, whatever its name. Others (vector graphics, astronomy, fonts) are refused.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
# Several pictures in a file of one of these play; in others, such as photographs with a depth map, the first is meant.
_PLAYS = ("GIF", "PNG", "WEBP", "AVIF")
_ORIENTATION, _SUBFILE = 0x0112, 0x00FE
_MOST_COPIES = 32  # of a picture, in smaller sizes
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height


@dataclass(frozen=True)
class PictureHeader:
    width: int
    height: int
    animated: bool
    turned: bool  # its EXIF data swaps width and height
    pages: bool = False  # a document of several


def open_header(content: bytes, name: str, limits: MediaLimits) -> Picture:
    """Opened, no pixel decoded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise not_installed("Pillow", "reading pictures") from None
    Image.MAX_IMAGE_PIXELS = None  # `limits` decide, from the header
    try:
        Image.init()  # a Pillow may lack some of them
        picture = Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        raise MediaError(
            "bad_picture", f"{name}: no picture of a kind that is read ({', '.join(FORMATS)}), or its header is damaged"
        ) from None
    except Exception as error:
        if "MAX_TEXT" in str(error):  # Pillow's bounds on what a PNG may unpack beside its pixels
            raise MediaError("bad_picture", f"{name}: its metadata are too large; save it without them") from None
        raise MediaError("bad_picture", because(f"{name}: no picture that can be read", error)) from None
    if picture.width * picture.height > limits.pixels:
        raise MediaError(
            "too_many_pixels",
            f"{name}: {picture.width:,} x {picture.height:,} pixels, more than media_max_pixels={limits.pixels:,}",
        )
    if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):
        # Which numbers are black and white is recorded nowhere: cut to 0..255 most would be one or the other.
        raise MediaError(
            "bad_picture", f"{name}: its pixels are floating-point or 32-bit numbers; save it with 8 or 16 bits"
        )
    return picture


def read_header(content: bytes, name: str, limits: MediaLimits) -> PictureHeader:
    picture = open_header(content, name, limits)
    turned = _orientation(picture) in _SIDEWAYS
    return PictureHeader(picture.width, picture.height, _animated(picture), turned, _has_pages(picture))


def read_pixels(content: bytes, name: str, limits: MediaLimits, upright: bool) -> Picture:
    """RGB. upright: turned by its EXIF data. Transparent parts become white; 16 bits of grey lose the lower 8."""
    picture = open_header(content, name, limits)
    try:
        picture.load()
        orientation = _orientation(picture) if upright else 1
        if picture.mode.startswith("I"):
            picture = _eight_bits(picture)
        return _turned(_on_white(picture).convert("RGB"), orientation)
    except Exception as error:
        raise MediaError("bad_picture", because(f"{name}: the picture is damaged", error)) from None


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


def _has_pages(picture: Picture) -> bool:
    """Whether a TIFF holds more than one picture, those apart that it marks as smaller copies."""
    if picture.format != "TIFF":
        return False
    try:
        for number in range(1, _MOST_COPIES):
            picture.seek(number)
            kind = picture.tag_v2.get(_SUBFILE, 0)  # type: ignore[attr-defined]
            if not (isinstance(kind, int) and kind & 1):
                return True
    except Exception:  # no further one, or a damaged one: the first may be whole
        return False
    return True


def _orientation(picture: Picture) -> int:
    """1 where its EXIF data cannot be read. Pillow would decode a PNG in search of them."""
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
