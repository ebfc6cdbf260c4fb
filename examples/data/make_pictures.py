"""Makes the pictures beside this file and questions about them: python examples/data/make_pictures.py

Coloured shapes on a pale ground, one to four of a kind: which colour, which shape, how many. The same pixels on
every machine: drawn by arithmetic, packed into one archive that training reads in place.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIDE, CELL = 56, 28  # pixels; four cells, a shape in each at most
COLOURS = {
    "red": (210, 40, 40), "green": (40, 150, 60), "blue": (40, 70, 200), "yellow": (225, 190, 30),
    "black": (25, 25, 25), "purple": (140, 50, 160),
}  # fmt: skip
# Whether a point is inside, -1 to 1 both ways from the middle.
SHAPES: dict[str, Callable[[float, float], bool]] = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: abs(x) <= 0.85 and abs(y) <= 0.85,
    "triangle": lambda x, y: y <= 0.8 and abs(x) <= (y + 1) / 1.8,
    "cross": lambda x, y: min(abs(x), abs(y)) <= 0.33 and max(abs(x), abs(y)) <= 1,
}
COUNTS = ("one", "two", "three", "four")
QUESTIONS = {
    "colour": "Which colour are the shapes?",
    "shape": "Which shape is it?",
    "count": "How many shapes are there?",
}


def picture(shape: str, colour: str, count: int, draw: random.Random) -> bytes:
    """As PNG."""
    ground = tuple(draw.randint(225, 250) for _ in range(3))
    pixels = [[ground] * SIDE for _ in range(SIDE)]
    for cell in draw.sample(range(4), count):
        radius = draw.uniform(8, 12)
        middle = [CELL * (cell // 2 if axis else cell % 2) + CELL / 2 + draw.uniform(-2, 2) for axis in (0, 1)]
        for y in range(SIDE):
            for x in range(SIDE):
                if SHAPES[shape]((x + 0.5 - middle[0]) / radius, (y + 0.5 - middle[1]) / radius):
                    pixels[y][x] = COLOURS[colour]
    return png(pixels)


def png(pixels: list[list[tuple[int, ...]]]) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    lines = b"".join(b"\0" + bytes(level for pixel in line for level in pixel) for line in pixels)
    head = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")


def row(path: str, question: str, answer: str) -> str:
    content = [{"type": "image_url", "image_url": {"url": path}}, {"type": "text", "text": question}]
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": said}) + "\n"


def make(folder: Path) -> None:
    kinds = [(s, c, n) for s in SHAPES for c in COLOURS for n in range(1, 5)]
    with zipfile.ZipFile(folder / "shapes.zip", "w") as archive:
        for part, each, seed in (("train", 3, 1), ("eval", 1, 2)):
            draw, lines = random.Random(seed), []
            for number, (shape, colour, count) in enumerate(kinds * each):
                name = f"{part}/{number:03}.png"
                archive.writestr(zipfile.ZipInfo(name), picture(shape, colour, count, draw))
                answers = {"colour": colour, "shape": shape, "count": COUNTS[count - 1]}
                lines += [row(f"shapes.zip/{name}", QUESTIONS[kind], f"{said}.") for kind, said in answers.items()]
            (folder / f"shapes-{part}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
