"""Makes the pictures beside this file and questions about them: python examples/data/make_pictures.py

They are those of `erniekit demo vision`: one to four coloured shapes, with the questions which colour, which shape
and how many. Each archive is read in place by training.
"""

from __future__ import annotations

import sys
from pathlib import Path

from erniekit.demo.shapes import scenes, write_pictures

HERE = Path(__file__).resolve().parent
PARTS = {"train": (192, 1), "eval": (64, 2)}  # how many pictures, drawn from which seed


def make(folder: Path) -> None:
    for part, (count, seed) in PARTS.items():
        write_pictures(folder, f"shapes-{part}", scenes(count, seed))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
