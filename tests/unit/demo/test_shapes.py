"""The drawn pictures: what is asked can be seen, and cannot be guessed."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from erniekit.demo import shapes


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


@pytest.mark.parametrize("colour", shapes.COLOURS)
def test_a_picture_shows_its_colour_and_only_that(colour: str) -> None:
    shown = pixels(shapes.Scene("square", colour, "two", seed=5).png())
    coloured = shown[np.ptp(shown, axis=-1) > 30]
    assert len(coloured) > 200
    assert (coloured == shapes.COLOURS[colour]).all()


def test_more_shapes_fill_more_cells() -> None:
    for number, count in enumerate(shapes.COUNTS, 1):
        shown = np.ptp(pixels(shapes.Scene("circle", "red", count, seed=7).png()), axis=-1) > 30
        cells = shown.reshape(shapes.CELLS, shapes.CELL, shapes.CELLS, shapes.CELL)
        assert (cells.sum((1, 3)) > 100).sum() == number


def test_each_answer_is_as_frequent_as_the_others_and_no_picture_is_there_twice() -> None:
    found = shapes.scenes(128, seed=1)
    for asked in shapes.QUESTIONS:
        assert set(Counter(scene.answer(asked) for scene in found).values()) == {32}
    other = shapes.scenes(128, seed=2)
    assert len({scene.png() for scene in (*found, *other)}) == 256


def test_rows_name_pictures_of_the_archive(tmp_path: Path) -> None:
    table = shapes.write_pictures(tmp_path, "some", shapes.scenes(3, seed=1))
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert len(rows) == 9
    assert (tmp_path / "some.tar").is_file()
    content = rows[0]["messages"][0]["content"]
    assert content[0]["image_url"]["url"] == "some.tar/0.png"
    again = shapes.write_pictures(tmp_path, "again", shapes.scenes(3, seed=1))
    assert again.read_text().replace("again", "some") == table.read_text()
