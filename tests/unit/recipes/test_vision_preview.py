"""Rows with pictures in the preview: thumbnails beside their token counts, for people and for the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.recipes.preview import lines, preview
from erniekit.webui.pages.data_preview import preview_html
from erniekit.webui.paths import Roots
from erniekit.webui.preview import Preview, PreviewMedium, PreviewRow
from erniekit.webui.preview import preview as page_preview
from support.jsonl import write_jsonl
from support.seeing import inline, picture, seeing_folder, user
from support.seen import MEDIA


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(MEDIA / "a.png", folder)
    seeing_folder(folder / "eyes")
    answer = {"role": "assistant", "content": "a bar."}
    write_jsonl(
        folder / "rows.jsonl",
        [
            {"messages": [user(picture("a.png"), picture(inline("b.png")), "which?"), answer]},
            {"messages": [user(picture(str(MEDIA / "b.png")), "what?"), answer]},
            {"messages": [user(picture("gone.png"), "what?"), answer]},
        ],
    )
    return folder


def test_rows_show_their_pictures_with_token_counts(root: Path) -> None:
    words = [f"train_dataset_path={root}/rows.jsonl", f"model_name_or_path={root}/eyes", "stage=VL-SFT"]
    told = preview(load([*words, "max_pixels=9408", "media_timeout=60"], "data"), 0, 5)
    near, elsewhere, gone = told["rows"]
    first, second = near["media"]
    assert (first["kind"], first["name"], first["frames"]) == ("picture", "a.png", 1)
    assert first["tokens"] == first["size"][0] * first["size"][1] // 784 > 0
    assert all(one["thumbnail"].startswith("data:image/jpeg;base64,") for one in (first, second))
    text = "".join(piece for piece, _ in near["pieces"])
    assert text.count(f"[picture a.png: {first['tokens']} tokens]") == 1
    assert "IMAGE_PLACEHOLDER" not in text
    assert near["tokens"] > first["tokens"] + second["tokens"] > near["trained"] > 0
    assert "thumbnail" not in elsewhere["media"][0], "a file outside the dataset's folder is counted, not shown"
    assert "gone.png" in gone["problem"]
    assert f"picture a.png: {first['size'][0]} x {first['size'][1]}, {first['tokens']} tokens" in "\n".join(lines(told))


def test_the_page_shows_them_too(root: Path) -> None:
    values = {"train_dataset_path": ["rows.jsonl"], "model_name_or_path": "eyes", "max_pixels": 9408, "stage": "VL-SFT"}
    values["media_timeout"] = 60.0
    found = page_preview(values, Roots([root]), "train.vl_sft")
    assert found.error == ""
    elsewhere = found.rows[1]
    assert [len(row.media) for row in found.rows] == [2, 0, 0]
    assert "outside the folders of the page" in elsewhere.problem
    html = preview_html(found, 0, "en")
    assert html.count("<img src=") == 2
    assert html.count("<figcaption>") == 2


def test_nothing_but_a_picture_gets_into_the_page() -> None:
    for bad in ('data:image/jpeg;base64,AA" onerror="x', "https://example.org/a.jpg", "data:text/html;base64,AAAA"):
        medium = PreviewMedium("picture", "<b>a.png</b>", 4, (28, 28), 1, bad)
        shown = preview_html(Preview((PreviewRow("f", 1, media=(medium,)),)), 0, "en")
        assert "<img" not in shown
        assert "<b>" not in shown
    assert json.dumps(bad) not in shown
