"""Headers of pictures: what is refused says why."""

from __future__ import annotations

import io

import pytest
from PIL import Image, PngImagePlugin

from erniekit.data.media.limits import MediaError
from erniekit.data.media.picture import read_header
from support.seen import LIMITS


def test_a_picture_with_too_much_text_beside_its_pixels_says_so() -> None:
    notes, out = PngImagePlugin.PngInfo(), io.BytesIO()
    notes.add_text("workflow", "A" * (2 << 20), zip=True)
    Image.new("RGB", (8, 8)).save(out, "PNG", pnginfo=notes)
    with pytest.raises(MediaError, match=r"a\.png: its metadata are too large"):
        read_header(out.getvalue(), "a.png", LIMITS)
