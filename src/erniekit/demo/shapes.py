"""Pictures of shapes with questions about them, drawn from a seed: a tiny vision-language model learns them in minutes.

One to four equal shapes of one colour on a grid, moved and sized a little by chance. Three questions a picture; each
has four answers, equally frequent, so that a guess is right in one of four. Pictures go into one tar file,
which training reads in place. Called by recipes/demo_vision.py and examples/data/make_pictures.py.
"""

from __future__ import annotations

import base64
import io
import json
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.data.media.extra import not_installed

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 200, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
COUNTS = ("one", "two", "three", "four")
QUESTIONS = {
    "shape": "Which shape is it?",
    "colour": "Which colour is it?",
    "count": "How many are there?",
}
CHANCE = 1 / 4
CELLS, CELL = 2, 28  # a side of the grid, and pixels of a cell's: one token


@dataclass(frozen=True)
class Scene:
    shape: str
    colour: str
    count: str
    seed: int  # of places and sizes

    def answer(self, attribute: str) -> str:
        return str(getattr(self, attribute))

    def png(self) -> bytes:
        Image, ImageDraw = _pillow()
        rng = random.Random(self.seed)
        side = CELLS * CELL
        ground = rng.randrange(225, 256)
        picture = Image.new("RGB", (side, side), (ground, ground, ground))
        draw = ImageDraw.Draw(picture)
        for cell in rng.sample(range(CELLS * CELLS), 1 + COUNTS.index(self.count)):
            radius = rng.uniform(8, 11)
            x, y = (CELL * (at + 0.5) + rng.uniform(-2, 2) for at in (cell % CELLS, cell // CELLS))
            _draw(draw, self.shape, COLOURS[self.colour], x, y, radius)
        out = io.BytesIO()
        picture.save(out, "PNG")
        return out.getvalue()


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise not_installed("Pillow", "drawing pictures") from None
    return Image, ImageDraw


def _draw(draw: Any, shape: str, colour: tuple[int, int, int], x: float, y: float, r: float) -> None:
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), colour)
    elif shape == "square":
        draw.rectangle((x - 0.8 * r, y - 0.8 * r, x + 0.8 * r, y + 0.8 * r), colour)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)], colour)
    else:
        draw.rectangle((x - r, y - 0.3 * r, x + r, y + 0.3 * r), colour)
        draw.rectangle((x - 0.3 * r, y - r, x + 0.3 * r, y + r), colour)


def blank_png() -> bytes:
    """As large as the others, with nothing on it."""
    Image, _ = _pillow()
    out = io.BytesIO()
    Image.new("RGB", (CELLS * CELL, CELLS * CELL), (240, 240, 240)).save(out, "PNG")
    return out.getvalue()


def scenes(count: int, seed: int) -> list[Scene]:
    """Every kind as often as the others, up to one; in an order of their own."""
    kinds = [(s, c, n) for s in SHAPES for c in COLOURS for n in COUNTS]
    found = [Scene(*kinds[i % len(kinds)], seed=seed * 1_000_003 + i) for i in range(count)]
    random.Random(seed).shuffle(found)
    return found


def write_pictures(folder: Path, name: str, found: Sequence[Scene]) -> Path:
    """folder/NAME.jsonl, a row for each question, with the pictures in folder/NAME.tar."""
    rows = []
    with tarfile.open(folder / f"{name}.tar", "w") as tar:
        for number, scene in enumerate(found):
            content, member = scene.png(), tarfile.TarInfo(f"{number}.png")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            rows += [_row(f"{name}.tar/{member.name}", attribute, scene.answer(attribute)) for attribute in QUESTIONS]
    table = folder / f"{name}.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return table


def _row(url: str, attribute: str, answer: str) -> dict[str, Any]:
    return {"messages": [*question(url, attribute), {"role": "assistant", "content": answer}]}


def question(url: str, attribute: str) -> list[dict[str, Any]]:
    """The messages before the answer."""
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": QUESTIONS[attribute]}]}]


def data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def sentences() -> list[str]:
    """All texts of the rows: what a tokenizer should have pieces for."""
    return [*QUESTIONS.values(), *SHAPES, *COLOURS, *COUNTS, "Picture 1:"]
