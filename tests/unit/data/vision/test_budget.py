"""`erniekit data` on rows with pictures: what they cost, from headers alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from erniekit.data.formats import Detected
from erniekit.data.inspect import data_command
from erniekit.data.vision.budget import measure, model_rules
from erniekit.errors import ConfigError
from support.jsonl import write_jsonl
from support.seen import FOLDER, MEDIA

SEEN = Detected("messages", "as given", vision=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(MEDIA, tmp_path / "media")
    return tmp_path


def chat(*urls: str) -> dict:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    said = {"role": "user", "content": [*content, {"type": "text", "text": "what is it?"}]}
    return {"messages": [said, {"role": "assistant", "content": "a red bar."}]}


def test_a_row_costs_a_token_for_each_four_patches_and_a_larger_max_pixels_costs_more(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/big.jpg"), chat("media/big.jpg", "media/a.png")])
    told = measure(str(path), SEEN, model_rules(None, 28 * 28 * 40), 8192, None)
    assert [4 * tokens for tokens in told.tokens] == told.patches
    assert told.tokens[1] > told.tokens[0] > 30
    assert told.at[0.25] < told.at[0.5] < told.at[1.0] == sum(told.tokens)
    assert (told.pictures, told.videos) == (3, 0)


def test_a_damaged_picture_with_a_whole_header_is_counted_and_no_pixel_is_read(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/broken.png"), chat("media/none.png")])
    told = measure(str(path), SEEN, model_rules(None, None), 8192, None)
    assert len(told.tokens) == 1
    assert [(bad.line, bad.kind) for bad in told.bad] == [(2, "missing_media")]


def test_the_command_says_tokens_costs_bad_rows_and_what_would_be_cut(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/big.jpg"), chat("media/tiny.png"), chat("media/none.png")])
    assert data_command([str(path), "--length", "100", "--model", str(FOLDER / "tokenizer")]) == 1
    said = capsys.readouterr().out
    assert "messages (rows have `messages` with pictures or videos)" in said
    assert "3 rows, 2 pictures, 0 videos, 1 bad row " in said
    assert "what max_pixels costs" in said
    assert "1 row is longer than max_seq_len=100" in said
    assert f"{path}:1  " in said
    assert f"{path}:3" in said
    assert "tokens of a row in all" in said
    good = write_jsonl(folder / "good.jsonl", [chat("media/tiny.png")])
    assert data_command([str(good)]) == 0
    assert "text is not counted" in capsys.readouterr().out


def pair(url: str, **changed: object) -> dict:
    asked = {"messages": [{"role": "user", "content": "<image>what is it?"}], "images": [url]}
    return {**asked, "chosen": "a red bar.", "rejected": "a star, or so.", **changed}


def test_preference_rows_are_counted_with_their_pictures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "media/tiny.png"}}, {"type": "text", "text": "what?"}]
    prompt = [{"role": "user", "content": parts}]
    plain = {"instruction": "<image>what?", "images": ["media/tiny.png"], "chosen": "a bar.", "rejected": "a star."}
    rows = [pair("media/tiny.png"), {"prompt": prompt, "chosen": "a bar.", "rejected": "a star."}, plain]
    path = write_jsonl(folder / "pairs.jsonl", rows)
    for more in ([], ["--model", str(FOLDER / "tokenizer")]):
        assert data_command([str(path), *more]) == 0
        said = capsys.readouterr().out
        assert "for `stage: DPO`" in said
        assert "3 rows, 3 preference pairs, 3 pictures, 0 videos, 0 bad rows" in said
    assert data_command([str(write_jsonl(folder / "bad.jsonl", [pair("media/tiny.png"), pair("media/none.png")]))]) == 1
    assert "1 preference pair, 1 picture, 0 videos, 1 bad row " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--pixels", "-1"], ["--pixels", "0"], ["--pixels", "5"], ["--length", "-5"]])
def test_a_bound_that_is_none_is_refused_by_name(words: list[str], folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/tiny.png")])
    with pytest.raises(ConfigError, match=words[0]) as refused:
        data_command([str(path), *words])
    assert refused.value.where
    assert refused.value.fix


def test_bad_rows_that_are_not_shown_are_counted_without_those_that_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat("media/none.png")] * 15 + [chat("http://x/y.png")] * 15
    data_command([str(write_jsonl(folder / "rows.jsonl", rows))])
    assert "... and 10 more: remote 10" in capsys.readouterr().out
